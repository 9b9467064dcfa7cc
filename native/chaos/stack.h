// The store under test: stages and tier as a pipeline builds them, small.
#pragma once

#include <memory>

#include "content.h"
#include "plan.h"
#include "ucm/cache.h"
#include "ucm/posix.h"
#include "ucm/store.h"

namespace ucm::chaos {

inline constexpr std::uint64_t kCacheBytes = 32 * 32 * 1024;  // 32 objects of shape 0, of 96 keys

[[nodiscard]] PosixOptions posix_options(const Plan& plan, std::uint32_t shape,
                                         std::shared_ptr<IoFaults> faults);
[[nodiscard]] CacheOptions cache_options(const Plan& plan);

/// A store with what it is made of. Members are destroyed in the right order.
struct Stack {
  std::shared_ptr<PosixStage> posix;
  std::shared_ptr<HostTier> tier;
  std::unique_ptr<Store> store;

  /// Throws CacheError, PosixSetupError.
  Stack(const Plan& plan, std::uint32_t shape, std::shared_ptr<IoFaults> faults);
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
};

}  // namespace ucm::chaos
