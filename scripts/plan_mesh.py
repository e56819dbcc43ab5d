"""Says which mesh shape to take: `jaxllm plan`.

python scripts/plan_mesh.py llama-3.1-70b --devices 8xA100-80G --input-len 512 --output-len 256 --tpot-ms 50
"""

import sys

from jaxllm.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
