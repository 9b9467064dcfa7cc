"""See the package."""

from torchvision._names import any_class as __getattr__  # noqa: F401
