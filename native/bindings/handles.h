// What Python holds of native objects: a shared pointer inside a small bound class.
//
// Not nanobind's own shared_ptr conversion: that one keeps a Python reference whose release needs
// the GIL, and the last owner of a stage may be a native thread, which never takes the GIL.
#pragma once

#include <unistd.h>

#include <memory>

#include "ucm/device.h"
#include "ucm/host_tier.h"
#include "ucm/keep.h"
#include "ucm/stage.h"

namespace ucm::bindings {

/// A shared pointer that is kept, not destroyed, in a child after fork: destructors of native
/// objects join threads and destroy condition variables that only live in the parent.
template <class T>
class ForkSafe {
 public:
  ForkSafe(std::shared_ptr<T> p) : p_(std::move(p)) {}  // NOLINT: implicit on purpose
  template <class U>
  ForkSafe(std::shared_ptr<U> p) : p_(std::move(p)) {}  // NOLINT: implicit on purpose
  ~ForkSafe() {
    if (::getpid() != pid_) keep_forever(std::move(p_));
  }
  ForkSafe(const ForkSafe&) = default;
  ForkSafe& operator=(const ForkSafe&) = default;
  ForkSafe(ForkSafe&&) = default;
  ForkSafe& operator=(ForkSafe&&) = default;

  T* operator->() const noexcept { return p_.get(); }
  T& operator*() const noexcept { return *p_; }
  operator const std::shared_ptr<T>&() const noexcept { return p_; }  // NOLINT: implicit on purpose

 private:
  std::shared_ptr<T> p_;
  pid_t pid_ = ::getpid();
};

/// `ucm_core._native.Stage`. A stage of its own file returns one (or a bound subclass of it, where
/// the stage has methods of its own).
struct StageHandle {
  ForkSafe<Stage> stage;
};

/// `ucm_core._native.HostTier`: what the factory of a topmost memory stage (`Cache`) returns.
struct TierHandle {
  ForkSafe<HostTier> tier;
};

/// `ucm_core._native.Device`.
struct DeviceHandle {
  ForkSafe<Device> device;
};

}  // namespace ucm::bindings
