"""Replays public request traces through PrefixCacheManager and a store."""
