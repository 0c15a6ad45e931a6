# Put before torchvision's __init__.py by `make test-families`: its wheel in package registries is linked to CUDA, so
# that beside torch's build for CPUs the operators which it describes are missing. None of them is called for text.
import torch as _torch

_operators = _torch.library.Library("torchvision", "FRAGMENT")
for _name in (
    "nms",
    "qnms",
    "roi_align",
    "_roi_align_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
):
    _operators.define(f"{_name}(Tensor x) -> Tensor")
