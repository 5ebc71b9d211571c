#!/usr/bin/env bash
# Observed: for Gemma 4, whose global layers have larger heads than its other layers, Transformers
# raises an error where config.head_dim is read, also by getattr with a default and by hasattr,
# because its error is not an AttributeError.
# Expected: getattr(config, "head_dim", None) gives a size or None, as for every other family.
# Affected: tools that read the head size this way to plan memory or choose an attention kernel. A
# test model whose two sizes are equal does not show it, since its config counts as homogeneous.
# Versions: transformers 5.17.0, Python 3.11. Date: 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.17.0
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import platform

import transformers
from transformers import AutoConfig

print(f"Python {platform.python_version()}, transformers {transformers.__version__}")


def read(**sizes: int) -> str:
    """What getattr with a default gives, or the name of the error that it raises."""
    config = AutoConfig.for_model("gemma4_text", **sizes)
    try:
        return str(getattr(config, "head_dim", None))
    except Exception as error:
        return f"{type(error).__name__}, an AttributeError: {isinstance(error, AttributeError)}"


published = read()
equal = read(head_dim=256, global_head_dim=256)
print(f"heads of 256 and 512, as published: {published}")
print(f"all heads of 256: {equal}")
expected = "AmbiguousGlobalPerLayerAttributeError, an AttributeError: False"
raise SystemExit(not (published == expected and equal == "256"))
PYTHON
