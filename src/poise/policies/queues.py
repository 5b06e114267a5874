"""The rows of the catalogue that are orders of jobs, or time slices."""

from poise.policies import fifo, gittins, las, remaining, smallest_first, stride, tiresias
from poise.policies.listing import Claim, Family, Listing, Parameter, choice, count, limits, number, positive

_LIMITS = Parameter("limits", "3250/7200", "service at which a job moves to the next queue, in GPU-seconds", limits)
_PROMOTE = Parameter(
    "promote",
    "0",
    "waiting of this many times its running time brings a job back to the first queue; 0: never",
    number,
)
_PACKLIMIT = Parameter(
    "packlimit", "0.5", "models of greater skew (largest tensor ÷ size) insist on the fewest nodes", number
)
_TIRESIAS = "Gu et al., Tiresias, NSDI'19"

QUEUES = (
    Listing(
        "fifo",
        Family.QUEUE,
        "arrival order; the head blocks",
        "the baseline of the field",
        (Claim.NO_PREEMPTION, Claim.NO_DURATIONS, Claim.IN_ORDER),
        fifo.fifo,
    ),
    Listing(
        "fifo-skip",
        Family.QUEUE,
        "arrival order; those behind may pass a gang that does not fit",
        "first job fit of the Tiresias simulator, NSDI'19",
        (Claim.NO_PREEMPTION, Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        fifo.fifo_skip,
    ),
    Listing(
        "smallest-first",
        Family.QUEUE,
        "fewest GPUs first, preemptive",
        "sjf of the Tiresias simulator, NSDI'19",
        (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        smallest_first.smallest_first,
    ),
    Listing(
        "srtf",
        Family.QUEUE,
        "least remaining time first, preemptive",
        "Schrage 1968; SRTF in Tiresias, NSDI'19",
        (Claim.WORK_CONSERVING,),
        remaining.srtf,
    ),
    Listing(
        "srsf",
        Family.QUEUE,
        "least remaining GPU-time first, preemptive",
        "SRSF in Tiresias, NSDI'19 §2.2",
        (Claim.WORK_CONSERVING,),
        remaining.srsf,
    ),
    Listing(
        "lrtf",
        Family.QUEUE,
        "most remaining time first, preemptive",
        "the opposite of SRTF, as a bound",
        (Claim.WORK_CONSERVING,),
        remaining.lrtf,
    ),
    Listing(
        "las",
        Family.QUEUE,
        "least attained seconds first, preemptive at rounds",
        "Nuyens and Wierman 2008; Tiresias, NSDI'19 §3.2",
        (Claim.NO_DURATIONS, Claim.WORK_CONSERVING),
        las.las,
    ),
    Listing(
        "tiresias",
        Family.QUEUE,
        "queues by attained GPU-time (discretised 2D-LAS)",
        _TIRESIAS,
        (Claim.NO_DURATIONS,),
        tiresias.tiresias,
        (
            _LIMITS,
            _PROMOTE,
            _PACKLIMIT,
            Parameter("service", "gpu-seconds", "what is counted: gpu-seconds or seconds", choice(tiresias.Service)),
        ),
    ),
    Listing(
        "tiresias-gittins",
        Family.QUEUE,
        "queues by attained GPU-time, highest Gittins index first inside each",
        _TIRESIAS,
        (Claim.NO_DURATIONS,),
        gittins.gittins,
        (
            _LIMITS,
            _PROMOTE,
            _PACKLIMIT,
            Parameter("delta", "limit", "how far the index looks: limit of the queue, or best", choice(gittins.Delta)),
            Parameter("samples", "10", "finished jobs needed before the index is used", count),
        ),
    ),
    Listing(
        "stride",
        Family.STRIDE,
        "gang-aware stride: time slices in proportion to weight",
        "Chaudhary et al., Gandiva_fair, EuroSys'20 §3.2",
        (Claim.NO_DURATIONS,),
        stride.Stride,
        (
            Parameter("quantum", "60", "length of a time slice in seconds", positive),
            Parameter("clamp", "lag", "lag bounds how far a job may fall behind; off does not", choice(stride.Clamp)),
        ),
    ),
)
