"""Ray Serve's P and D on a CPU, with pdstore's connector: the program that test_ray_serve.py runs.

It needs Ray in its environment, and vLLM. It asks for one completion, and prints the answer; what
the engines say of the request is in their log, which Ray prints too.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import httpx

from examples.vllm_serve import CPU_ENVIRONMENT, ENVIRONMENT

TRANSFER = {
    "kv_connector": "PDStoreConnector",
    "kv_connector_module_path": "pdstore.adapters.vllm",
    "kv_load_failure_policy": "recompute",
    "kv_role": "kv_both",
}
TINY = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 64,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": False,
    "distributed_executor_backend": "mp",
    "kv_transfer_config": TRANSFER,
}
LOG_S = 8
"""Ray prints what its processes have logged after a while."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--store", "--port", "--temporary", "--prompt"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_pd_openai_app

    def instance(role: str) -> LLMConfig:
        own = {"PDSTORE_STORE": given.store, "PDSTORE_STAGING": "32MiB", "PDSTORE_ROLE": role}
        path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        return LLMConfig(
            model_loading_config={"model_id": "tiny", "model_source": given.model},
            engine_kwargs=TINY,
            runtime_env={"env_vars": ENVIRONMENT | CPU_ENVIRONMENT | own | path},
            deployment_config={"num_replicas": 1},
            accelerator_config={"kind": "cpu"},
        )

    ray.init(num_cpus=8, include_dashboard=False, _temp_dir=given.temporary)
    served = {"prefill_config": instance("prefill"), "decode_config": instance("decode")}
    serve.start(http_options={"host": "127.0.0.1", "port": int(given.port)})
    serve.run(build_pd_openai_app(served), blocking=False)
    body = {"model": "tiny", "prompt": json.loads(given.prompt), "max_tokens": 5}
    url = f"http://127.0.0.1:{given.port}/v1/completions"
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    print("ANSWER", answer.status_code, answer.text, flush=True)
    time.sleep(LOG_S)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
