"""How fast the operators are on the machine at hand, beside the least that its memory allows."""

from lorafold.bench.figures import geomean, rounded
from lorafold.bench.measure import call_site, check, measure
from lorafold.bench.sites import SITES, Call, Site, Workload, sites_of
from lorafold.bench.timing import H200_COPY_BYTES_PER_US, copy_bytes_per_us, graph_us, host_us

__all__ = [
    "H200_COPY_BYTES_PER_US",
    "SITES",
    "Call",
    "Site",
    "Workload",
    "call_site",
    "check",
    "copy_bytes_per_us",
    "geomean",
    "graph_us",
    "host_us",
    "measure",
    "rounded",
    "sites_of",
]
