"""Where the prunable parts of a model are: plain data that names modules, and access to their weights.

It imports errors and io only; every package after it may import it, by the names listed here.
"""

from corp.sites.found import Finding as Finding
from corp.sites.found import Layer as Layer
from corp.sites.found import Refusal as Refusal
from corp.sites.found import Sites as Sites
from corp.sites.kinds import AttentionSite as AttentionSite
from corp.sites.kinds import LinearSite as LinearSite
from corp.sites.kinds import Mask as Mask
from corp.sites.kinds import MLPSite as MLPSite
from corp.sites.kinds import OutputHead as OutputHead
from corp.sites.kinds import QKNorm as QKNorm
from corp.sites.kinds import Rotary as Rotary
from corp.sites.kinds import Rows as Rows
from corp.sites.kinds import Site as Site
from corp.sites.kinds import ValueSite as ValueSite
from corp.sites.kinds import and_others as and_others
from corp.sites.kinds import at_site as at_site
from corp.sites.kinds import heads_of as heads_of
from corp.sites.kinds import layers_of as layers_of
from corp.sites.kinds import module_of as module_of
from corp.sites.weights import Projection as Projection
from corp.sites.weights import features_last as features_last
from corp.sites.weights import fingerprint as fingerprint
from corp.sites.weights import fingerprint_of as fingerprint_of
from corp.sites.weights import gains_of as gains_of
from corp.sites.weights import is_pointwise as is_pointwise
from corp.sites.weights import is_transposed as is_transposed
from corp.sites.weights import projection_at as projection_at
from corp.sites.weights import projection_of as projection_of
from corp.sites.weights import rows_of as rows_of
from corp.sites.weights import site_devices as site_devices
