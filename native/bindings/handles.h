// What Python holds of native stages and tiers: a shared pointer inside a small bound class.
//
// Not nanobind's own shared_ptr conversion: that one keeps a Python reference whose release needs
// the GIL, and the last owner of a stage may be a native thread, which never takes the GIL.
#pragma once

#include <memory>

#include "ucm/host_tier.h"
#include "ucm/stage.h"

namespace ucm::bindings {

/// `ucm_core._native.Stage`. A stage of its own file returns one (or a bound subclass of it, where
/// the stage has methods of its own).
struct StageHandle {
  std::shared_ptr<Stage> stage;
};

/// `ucm_core._native.HostTier`: what the factory of a topmost memory stage (`Cache`) returns.
struct TierHandle {
  std::shared_ptr<HostTier> tier;
};

}  // namespace ucm::bindings
