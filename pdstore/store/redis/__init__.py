"""RedisStore: blocks in a redis server, for tests and small clusters."""
