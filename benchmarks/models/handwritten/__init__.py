"""Small models as people write them, each for one mechanism."""

from benchmarks.models.handwritten import attention, composed, images, parameters, sequences

MODELS = {**parameters.MODELS, **attention.MODELS, **sequences.MODELS, **images.MODELS, **composed.MODELS}
