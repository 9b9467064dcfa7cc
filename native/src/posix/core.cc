#include "posix/core.h"

#include "posix/collector.h"
#include "posix/housekeeper.h"

namespace ucm::posix {

Core::Core(const Geometry& geometry, PosixOptions opts)
    : options(std::move(opts)),
      format(geometry, options.namespace_digest),
      scratch(geometry.object_bytes()),
      me(Identity::of_this_process()),
      temps(me.label) {}

Core::~Core() = default;

}  // namespace ucm::posix
