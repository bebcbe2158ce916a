"""Generated table of methods: what can be known of them without importing their modules.

`python -m partsong.methods.reference --write` writes this file from the registrations; a test compares.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """Module, one sentence, parameters, those without a default, tasks, and the name of a method over pooled texts."""

    module: str
    summary: str
    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("parties",)
    pooled_name: str = ""


TABLE: dict[str, Entry] = {
    "exact": Entry(
        "partsong.methods.exact",
        "Parties send WᵀW and WᵀX; the result equals as many iterations on the pooled rows.",
        ("local_steps", "accelerate", "init_mode"),
        tasks=("parties", "texts", "ranks"),
        pooled_name="nmf",
    ),
    "moment": Entry(
        "partsong.methods.moment",
        "Parties send XᵀX once; the server computes H from it, and two exact rounds finish.",
        (),
    ),
    "fnmf-local": Entry(
        "partsong.methods.fnmf",
        "Parties iterate for long local phases; the server matches their components before averaging.",
        (
            "align", "client_align", "server_align", "local_steps", "strength", "every", "variant",
            "barycenter", "synchronization", "init_mode",
        ),
    ),
    "fnmf": Entry(
        "partsong.methods.fnmf",
        "One round of fnmf-local, then exact rounds.",
        (
            "align", "client_align", "server_align", "local_steps", "strength", "every", "variant",
            "barycenter", "synchronization", "init_mode",
        ),
        tasks=("parties", "texts"),
    ),
    "fnmf-paper": Entry(
        "partsong.methods.fnmf",
        "Like fnmf-local, exactly as the paper prints it.",
        (
            "align", "client_align", "server_align", "local_steps", "strength", "every", "barycenter",
            "synchronization", "init_mode",
        ),
    ),
    "fnmf-personal": Entry(
        "partsong.methods.fnmf",
        "Like fnmf-local, but each party keeps its components without a partner in the shared model.",
        (
            "align", "client_align", "server_align", "local_steps", "strength", "every", "barycenter",
            "init_mode",
        ),
    ),
    "fnmf-by-sums": Entry(
        "partsong.methods.fnmf",
        "Like fnmf-local, but parties align their own H_p, so the barycenter is a sum and can be masked.",
        ("align", "local_steps", "strength", "every", "variant", "init_mode", "sweeps"),
    ),
    "fedavg": Entry(
        "partsong.methods.averaging",
        "Parties iterate from the shared H; the server averages the results by position.",
        ("local_steps", "weighted", "init_mode"),
    ),
    "fedprox": Entry(
        "partsong.methods.averaging",
        "Like fedavg, with a proximal term that keeps each H_p near the shared H.",
        ("strength", "local_steps", "init_mode"),
    ),
    "one-shot-ipalm": Entry(
        "partsong.methods.averaging",
        "Every party factorizes its own rows; the components are averaged once, by position.",
        ("local_steps", "init_mode"),
    ),
    "one-shot-mu": Entry(
        "partsong.methods.averaging",
        "Like one-shot-ipalm, with multiplicative updates.",
        ("local_steps", "init_mode"),
    ),
    "local-only": Entry(
        "partsong.methods.averaging",
        "Every party factorizes its own rows from its own start, and unmatched H_p are averaged once: a "
        "negative control.",
        ("local_steps", "init_mode"),
    ),
    "syn-sd": Entry(
        "partsong.methods.secure_sketched",
        "Like fedavg, with proximal steps that shrink over time.",
        ("local_steps", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "syn-ssd-u": Entry(
        "partsong.methods.secure_sketched",
        "Like syn-sd, but in every step W fits a sketch of the mean H.",
        ("local_steps", "sketch", "sketch_ratio", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "syn-ssd-v": Entry(
        "partsong.methods.secure_sketched",
        "Like syn-sd, but in every step W fits the mean H, and steps of H are sketched with a private "
        "sketch.",
        ("local_steps", "sketch", "sketch_ratio", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "syn-ssd-uv": Entry(
        "partsong.methods.secure_sketched",
        "Like syn-sd, but in every step W fits a sketch of the mean H, and steps of H are sketched with a"
        " private sketch.",
        ("local_steps", "sketch", "sketch_ratio", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "asyn-sd": Entry(
        "partsong.methods.secure_sketched",
        "Asynchronous syn-sd: the server moves towards each H_p when it arrives, and no party waits.",
        ("local_steps", "rho", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "asyn-ssd-v": Entry(
        "partsong.methods.secure_sketched",
        "Like asyn-sd, with steps of H sketched by a private sketch.",
        ("local_steps", "rho", "rule", "init_mode", "sketch", "sketch_ratio"),
        tasks=("parties", "ranks"),
    ),
    "secure-dsanls": Entry(
        "partsong.methods.secure_sketched",
        "Modified DSANLS: parties send sketches of their X and W, and stop before these determine X.",
        ("sketch", "sketch_dimension", "columns_sketch", "columns_ratio"),
    ),
    "dsanls": Entry(
        "partsong.methods.dsanls",
        "Nodes hold blocks of both factors and exchange sketches: for the machines of one owner.",
        ("sketch", "sketch_ratio", "rule", "every"),
        tasks=("ranks",),
    ),
    "game": Entry(
        "partsong.methods.game",
        "Rows and columns play a game over single cells; blocks of columns travel between parties; a "
        "round is a sweep.",
        ("order", "step", "step_decay", "self_play", "shrink", "leader", "local_steps", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "game-consensus": Entry(
        "partsong.methods.game",
        "Like fedavg, with sweeps of the game over a party's own rows as local steps.",
        ("order", "step", "step_decay", "self_play", "shrink", "leader", "local_steps", "init_mode"),
    ),
    "then-exact": Entry(
        "partsong.methods.two_stage",
        "A few rounds of another method, then exact rounds from the model it has reached.",
        ("first", "first_rounds"),
        required=("first", "first_rounds"),
    ),
    "fednmf": Entry(
        "partsong.methods.fednmf",
        "Parties descend on mini-batches of documents; the server averages, or takes adaptive steps.",
        ("epochs", "batch", "rate", "weight_step", "warm_start_weights", "server", "server_rate"),
        tasks=("texts",),
        pooled_name="nmf-sgd",
    ),
    "fednmf-mi": Entry(
        "partsong.methods.fednmf",
        "Like fednmf, with a term that keeps mutual information between weights and documents, estimated "
        "by a critic.",
        (
            "epochs", "batch", "rate", "weight_step", "warm_start_weights", "server", "server_rate",
            "strength", "critic", "mi_gradient", "critic_rate",
        ),
        tasks=("texts",),
        pooled_name="nmf-sgd-mi",
    ),
    "fedlda": Entry(
        "partsong.methods.fedlda",
        "Latent Dirichlet allocation: parties infer the topics of their documents and send expected word "
        "counts.",
        (),
        tasks=("texts",),
        pooled_name="lda",
    ),
}  # fmt: skip

CHOICES: dict[str, tuple[str, ...]] = {
    "init_mode": ("shared", "local"),
    "align": (
            "assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn", "nearest", "softmax",
            "identity",
        ),
    "client_align": (
            "assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn", "nearest", "softmax",
            "identity",
        ),
    "server_align": (
            "assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn", "nearest", "softmax",
            "identity",
        ),
    "variant": ("robust", "paper"),
    "barycenter": ("fixed-point", "streaming", "hierarchical", "k-means", "fuzzy-c-means"),
    "synchronization": ("overwrite", "personal"),
    "rule": ("hals", "cd", "mu", "pg", "ipalm", "bpp", "sanls"),
    "sketch": ("subsampling", "gaussian", "count", "hadamard"),
    "columns_sketch": ("subsampling", "gaussian", "count", "hadamard"),
    "order": ("stratified", "sequential", "random", "simultaneous", "alternating"),
    "step": ("safe",),
    "self_play": ("none", "min", "max"),
    "leader": ("rows", "columns"),
    "weight_step": ("document", "batch"),
    "server": ("average", "adagrad", "yogi", "adam"),
    "critic": ("concat", "separable"),
    "mi_gradient": ("dv", "js"),
}  # fmt: skip
"""Parameters with named values → all names, over all methods."""
