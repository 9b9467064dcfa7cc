"""See the package. Other submodules do not exist: SGLang has a way without them."""

from sgl_kernel import absent

__getattr__ = absent("sgl_kernel.mamba")
