"""A small OpenAI-compatible router in front of prefill and decode instances.

`pdstore-router --prefill URL --decode URL`. It speaks the usual `kv_transfer_params` convention, so
it works in front of the mini engine and of vLLM alike. It needs the extra `router`.
"""
