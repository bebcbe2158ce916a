"""The lazy table: where methods live, and what may be known of them without importing them. Generated.

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
        "Parties send WᵀW and WᵀX; the sums give exactly what as many iterations on pooled rows would.",
        ("local_steps", "accelerate", "init_mode"),
        tasks=("parties", "texts", "ranks"),
        pooled_name="nmf",
    ),
    "fnmf-local": Entry(
        "partsong.methods.fnmf",
        "Parties iterate long and alone; which component is which is found out before averaging.",
        (
            "align", "client_align", "server_align", "local_steps", "strength", "every", "variant",
            "barycenter", "synchronisation", "init_mode",
        ),
    ),
    "fnmf": Entry(
        "partsong.methods.fnmf",
        "One round as fnmf-local, then WᵀW and WᵀX as exact.",
        (
            "align", "client_align", "server_align", "local_steps", "strength", "every", "variant",
            "barycenter", "synchronisation", "init_mode",
        ),
        tasks=("parties", "texts"),
    ),
    "fnmf-paper": Entry(
        "partsong.methods.fnmf",
        "As fnmf-local, exactly as the paper prints it.",
        (
            "align", "client_align", "server_align", "local_steps", "strength", "every", "barycenter",
            "synchronisation", "init_mode",
        ),
    ),
    "fnmf-personal": Entry(
        "partsong.methods.fnmf",
        "As fnmf-local, while each party keeps the components that have no partner in the shared model.",
        (
            "align", "client_align", "server_align", "local_steps", "strength", "every", "barycenter",
            "init_mode",
        ),
    ),
    "fnmf-by-sums": Entry(
        "partsong.methods.fnmf",
        "As fnmf-local, with a barycenter of sums: parties align themselves, and sums can be masked.",
        ("align", "local_steps", "strength", "every", "variant", "init_mode", "sweeps"),
    ),
    "fedavg": Entry(
        "partsong.methods.averaging",
        "Parties iterate from the shared H, which is then averaged by position.",
        ("local_steps", "weighted", "init_mode"),
    ),
    "fedprox": Entry(
        "partsong.methods.averaging",
        "As fedavg, while parties are pulled to the shared H.",
        ("strength", "local_steps", "init_mode"),
    ),
    "one-shot-ipalm": Entry(
        "partsong.methods.averaging",
        "Every party iterates alone; components are averaged once, by position.",
        ("local_steps", "init_mode"),
    ),
    "one-shot-mu": Entry(
        "partsong.methods.averaging",
        "As one-shot-ipalm, by multiplicative updates.",
        ("local_steps", "init_mode"),
    ),
    "local-only": Entry(
        "partsong.methods.averaging",
        "Every party factorizes alone from its own start, and the H_p are averaged once: what not to do.",
        ("local_steps", "init_mode"),
    ),
    "syn-sd": Entry(
        "partsong.methods.secure_sketched",
        "As fedavg, with steps that are held back more and more.",
        ("local_steps", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "syn-ssd-u": Entry(
        "partsong.methods.secure_sketched",
        "As syn-sd, while W fits a sketch of the mean of all H in every step.",
        ("local_steps", "sketch", "sketch_ratio", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "syn-ssd-v": Entry(
        "partsong.methods.secure_sketched",
        "As syn-sd, while W fits the mean of all H in every step, and steps of H are sketched.",
        ("local_steps", "sketch", "sketch_ratio", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "syn-ssd-uv": Entry(
        "partsong.methods.secure_sketched",
        "As syn-sd, while W fits a sketch of the mean of all H in every step, and steps of H are "
        "sketched.",
        ("local_steps", "sketch", "sketch_ratio", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "asyn-sd": Entry(
        "partsong.methods.secure_sketched",
        "As syn-sd, but no party waits for another: the server moves towards each H as it comes.",
        ("local_steps", "rho", "rule", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "asyn-ssd-v": Entry(
        "partsong.methods.secure_sketched",
        "As asyn-sd, with steps of H that are sketched, by a sketch that nobody else knows (Alg. 7).",
        ("local_steps", "rho", "rule", "init_mode", "sketch", "sketch_ratio"),
        tasks=("parties", "ranks"),
    ),
    "secure-dsanls": Entry(
        "partsong.methods.secure_sketched",
        "Modified DSANLS: parties with rows alone send sketches of X and W, for as long as these do not "
        "give X away.",
        ("sketch", "sketch_dimension", "columns_sketch", "columns_ratio"),
    ),
    "dsanls": Entry(
        "partsong.methods.dsanls",
        "Both factors in blocks, of which only sketches are exchanged: for the machines of one owner.",
        ("sketch", "sketch_ratio", "rule", "every"),
        tasks=("ranks",),
    ),
    "game": Entry(
        "partsong.methods.game",
        "Rows play single cells with columns, which travel from party to party; a round is a sweep.",
        ("order", "step", "step_decay", "self_play", "shrink", "leader", "local_steps", "init_mode"),
        tasks=("parties", "ranks"),
    ),
    "game-consensus": Entry(
        "partsong.methods.game",
        "As fedavg, with sweeps of the game over a party's own rows as local steps.",
        ("order", "step", "step_decay", "self_play", "shrink", "leader", "local_steps", "init_mode"),
    ),
    "then-exact": Entry(
        "partsong.methods.two_stage",
        "A few rounds of another method, then exact ones from the model that it has reached.",
        ("first", "first_rounds"),
        required=("first", "first_rounds"),
    ),
    "fednmf": Entry(
        "partsong.methods.fednmf",
        "Descent on batches of documents at the parties; the server averages, or takes steps of its own.",
        ("epochs", "batch", "rate", "weight_step", "warm_start_weights", "server", "server_rate"),
        tasks=("texts",),
        pooled_name="nmf-sgd",
    ),
    "fednmf-mi": Entry(
        "partsong.methods.fednmf",
        "As fednmf, while weights keep mutual information with the documents, by a critic that is learned"
        " with them.",
        (
            "epochs", "batch", "rate", "weight_step", "warm_start_weights", "server", "server_rate",
            "strength", "critic", "mi_gradient", "critic_rate",
        ),
        tasks=("texts",),
        pooled_name="nmf-sgd-mi",
    ),
    "fedlda": Entry(
        "partsong.methods.fedlda",
        "Latent Dirichlet allocation: parties infer the topics of their documents and send expected "
        "counts of words.",
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
    "synchronisation": ("overwrite", "personal"),
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
"""Parameters that have names for values -> all names, over all methods."""
