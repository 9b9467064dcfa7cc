"""Types of the compiled module; one stub per native part, bound in native/bindings/bind_<part>.cc."""

from . import hash as hash
from .cache import CacheSetupError as CacheSetupError
from .cache import CacheTooSmallError as CacheTooSmallError
from .cache import cache_tier as cache_tier
from .cache import reclaim_dead_caches as reclaim_dead_caches
from .convert import Converter as Converter
from .device import Device as Device
from .device import DeviceSetupError as DeviceSetupError
from .device import cuda_device as cuda_device
from .device import host_device as host_device
from .posix import PosixSetupError as PosixSetupError
from .posix import PosixStage as PosixStage
from .stages import PLANTED_BUGS as PLANTED_BUGS
from .stages import FakeMedium as FakeMedium
from .stages import FakeStage as FakeStage
from .stages import Geometry as Geometry
from .stages import HostEvent as HostEvent
from .stages import HostTier as HostTier
from .stages import Stage as Stage
from .stages import canary_stage as canary_stage
from .stages import empty_stage as empty_stage
from .stages import guard_stage as guard_stage
from .stages import staging_tier as staging_tier
from .store import LentBuffer as LentBuffer
from .store import Store as Store
from .store import Task as Task
