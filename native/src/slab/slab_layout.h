// Layout `slab`: fixed slots in preallocated files, shared by the processes of one node.
#pragma once

#include <memory>

#include "posix/object_layout.h"

namespace ucm::slab {

/// Attaches to the node's index of these directories, or makes it by scanning the files. Throws
/// PosixSetupError.
[[nodiscard]] std::shared_ptr<posix::ObjectLayout> make_slab_layout(
    std::shared_ptr<posix::Core> core);

}  // namespace ucm::slab
