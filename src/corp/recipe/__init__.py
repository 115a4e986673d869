"""The request: plain values become a validated and frozen `Recipe`.

It imports errors and io only; every package after it may import it, by the names listed here.
"""

from corp.recipe.choices import AUTO as AUTO
from corp.recipe.choices import BASES as BASES
from corp.recipe.choices import BUDGET as BUDGET
from corp.recipe.choices import COMPENSATIONS as COMPENSATIONS
from corp.recipe.choices import COORDINATES as COORDINATES
from corp.recipe.choices import GAIN as GAIN
from corp.recipe.choices import HOW as HOW
from corp.recipe.choices import KINDS as KINDS
from corp.recipe.choices import PRESETS as PRESETS
from corp.recipe.choices import RANKINGS as RANKINGS
from corp.recipe.choices import REMOVE as REMOVE
from corp.recipe.choices import ROTARY as ROTARY
from corp.recipe.choices import SHARED as SHARED
from corp.recipe.choices import SUBSPACE as SUBSPACE
from corp.recipe.choices import TOGETHER as TOGETHER
from corp.recipe.choices import UNIFORM as UNIFORM
from corp.recipe.recipe import Recipe as Recipe
from corp.recipe.recipe import preset_of as preset_of
from corp.recipe.rounding import FAST as FAST
from corp.recipe.rounding import ROUNDING_KEYS as ROUNDING_KEYS
from corp.recipe.rounding import kept_width as kept_width
