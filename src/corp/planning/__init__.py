"""Statistics to plan: the sums of a site and its width come in, a `SitePlan` with its predicted cost goes out.

It changes no model and reads no data; surgery and everything above may import it.
"""
