"""python -m rollout.vllm.served MODEL ARGUMENTS...: checks that the tensors of MODEL's files are those of its
config.json, then starts vLLM's OpenAI-compatible server with these arguments. It is for models whose check needs
transformers, which vLLM imports anyway (rollout.data.weight_names)."""

import runpy
import sys

from cluster.errors import WrongInput
from rollout.data.weight_names import check_fit

SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    _, model, *arguments = sys.argv
    try:
        check_fit(model)
    except WrongInput as error:
        print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        sys.exit(2)
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
