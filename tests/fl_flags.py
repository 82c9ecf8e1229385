"""Flags of a run that takes well under a second."""

TINY = ["--clients", "4", "--participants", "2", "--rounds", "4", "--local-epochs", "1", "--width", "0.1"]
TINY += ["--batch-size", "50", "--local-valid", "0.1", "--samples", "500"]
OF_METHOD = {
    "depthfl": ["--exits", "--model", "resnet9"],
    "scalefl": ["--exits", "--model", "resnet9"],
    "fedbn": ["--norm", "batch", "--model", "resnet9"],
    "fedsa_lora": ["--adapters.kind", "lora"],
    "flexlora": ["--adapters.kind", "lora", "--adapters.ranks", "1,2"],
    "flora": ["--adapters.kind", "lora", "--adapters.ranks", "1,2"],
    "flora_na": ["--adapters.kind", "lora"],
    "hetlora": ["--adapters.kind", "lora", "--adapters.ranks", "1,2"],
    "fedmr": ["--fedmr.stage1-rounds", "2"],
    "fesem": ["--fesem.clusters", "2"],
    "fesem_plus": ["--fesem-plus.clusters", "2"],
    "femam": ["--femam.levels", "global,2,personal", "--femam.level-rounds", "1,2"],
}
