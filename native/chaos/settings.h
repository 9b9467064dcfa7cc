// What one process of a campaign has planted in it: set after fork, before the store is opened.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "chaos/hooks.h"

namespace ucm::chaos {

struct Settings {
  Point point = Point::kNone;                        ///< dies at the ...
  std::uint64_t passage = 0;                         ///< ... n-th passage of this point; 0: never
  Bug bug = Bug::kNone;                              ///< of canary runs
  std::chrono::milliseconds tick{0};                 ///< see tick(); 0: as in every other build
  const std::atomic<std::uint32_t>* calm = nullptr;  ///< while not 0 nobody dies by a point
};

/// Not thread-safe: called once in a process that has one thread.
void arm(const Settings& settings) noexcept;

/// "segment_create" and so on, for tables.
[[nodiscard]] const char* point_name(Point point) noexcept;
[[nodiscard]] const char* bug_name(Bug bug) noexcept;

}  // namespace ucm::chaos
