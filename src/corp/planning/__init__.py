"""From statistics to a plan: takes the sums of a site and its width, returns a `SitePlan` with its predicted cost.

It changes no model and reads no data; surgery and all packages above may import it.
"""
