"""The model card of saved weights."""

from __future__ import annotations

from typing import Any

from corp.io.tables import markdown_table
from corp.planning.report import TOTALS, Report
from corp.planning.site_plan import COLUMNS


def model_card(report: Report, manifest: dict[str, Any]) -> str:
    """A short README.md: what this is, how to load it, what it cost."""
    identity = (manifest["base"] or {}).get("identity", {})
    base = identity.get("architecture")  # timm's name; transformers' models have a class and a config
    name = base or identity.get("class") or "a model of your own"
    recipe = ", ".join(f"{key}={value!r}" for key, value in manifest["recipe"].items() if value not in ((), [], {}))
    argument = "" if manifest["base"] else ", base=dense_model"
    return f"""---
library_name: corp
tags: [pruned]
{f"base_model: timm/{base}" if base else ""}
---
# {name}, pruned

Made with corp {manifest["corp"]} from {report.plan.samples} unlabelled calibration samples, in closed form: no
training, no labels. Recipe: {recipe}.

```python
import corp

model = corp.load("path/to/this/folder"{argument})
```

{markdown_table(TOTALS, report.totals())}

`error` is the predicted squared error of a site's output relative to its energy, on the calibration data, with the
dense model's inputs; `rho²` is the share of what was removed that the kept part predicts.

{markdown_table(COLUMNS, [site.row() for site in report.plan.sites])}
"""
