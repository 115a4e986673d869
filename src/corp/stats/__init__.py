"""What is remembered of the data: sums that add, never the data itself."""

from corp.stats.collect import Collector
from corp.stats.grams import Grams
from corp.stats.moments import Moments
from corp.stats.site_sums import SiteSums
from corp.stats.statistics import Statistics

__all__ = ["Collector", "Grams", "Moments", "SiteSums", "Statistics"]
