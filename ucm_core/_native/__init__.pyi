"""Types of the compiled module; one stub per native part, bound in native/bindings/bind_<part>.cc."""

from . import hash as hash
