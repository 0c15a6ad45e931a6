"""What generators and learner both import: three quarters of the learner's imports, and half of a generator's."""

import torch  # noqa: F401
import transformers.modeling_utils  # noqa: F401

import rollout.schema  # noqa: F401
