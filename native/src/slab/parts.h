// What all parts of one slab stage share. Outlives every thread of the stage (they hold it).
#pragma once

#include <atomic>
#include <memory>

#include "posix/core.h"
#include "slab/allocator.h"
#include "slab/index.h"

namespace ucm::slab {

class Scribe;

struct Parts {
  Parts(std::shared_ptr<posix::Core> c, std::shared_ptr<Segment> s);
  ~Parts();
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  const std::shared_ptr<posix::Core> core;
  const std::shared_ptr<Segment> segment;
  Index index;
  Allocator allocator;
  std::unique_ptr<Scribe> scribe;

  std::atomic<std::uint32_t> lost{0};  ///< roots (a bit each) that another host has taken
  std::atomic<std::uint32_t> gone{0};  ///< likewise, whose files were deleted or mounted over
  std::atomic<std::uint64_t> page_writes{0};
  std::atomic<std::uint64_t> commits{0};
  std::atomic<std::uint64_t> no_slot{0};  ///< writes refused because everything is in use

  [[nodiscard]] bool usable(std::uint32_t root, posix::Direction d) const noexcept {
    const std::uint32_t out =
        lost.load(std::memory_order_relaxed) | gone.load(std::memory_order_relaxed);
    return (out >> root & 1u) == 0 && core->roots[root]->serves(d);
  }
  [[nodiscard]] std::string path_of(std::uint32_t extent) const {
    return segment->files().path(segment->root_of(extent), segment->number_of(extent));
  }
};

}  // namespace ucm::slab
