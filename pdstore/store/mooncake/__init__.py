"""MooncakeStore: blocks in a Mooncake pool, over TCP or RDMA."""
