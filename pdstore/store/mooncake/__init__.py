"""MooncakeStore: blocks in a Mooncake pool, over TCP, RDMA or shared memory."""
