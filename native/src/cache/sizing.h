// How large a segment is and how its pages come to exist.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ucm/geometry.h"

namespace ucm::cache {

/// Sizes of a segment made for `capacity` bytes of data by a creator with `geometry`.
struct Plan {
  std::uint64_t capacity = 0;  ///< as asked
  std::uint64_t extent_bytes = 0;
  std::uint32_t extents = 0;
  std::uint32_t control_bytes = 0;
  std::uint32_t slot_stride = 0;
  std::uint32_t buckets = 0;
  std::uint64_t controls_offset = 0;
  std::uint64_t data_offset = 0;
  std::uint64_t segment_bytes = 0;
};

/// extents == 0: not even one object fits.
[[nodiscard]] Plan make_plan(std::uint64_t capacity, const Geometry& geometry) noexcept;

/// Bytes that may still be allocated: MemAvailable and the room under the cgroup's limit.
[[nodiscard]] std::uint64_t available_memory() noexcept;
/// Free bytes of the file system that holds `directory`; 0 when it cannot be asked.
[[nodiscard]] std::uint64_t free_space(const std::string& directory) noexcept;

/// Does a kernel's list of nodes ("0-1", "0,2", "0") name more than one?
[[nodiscard]] bool several_nodes(std::string_view online) noexcept;

/// Interleave over NUMA nodes and ask for huge pages, where the host has them. Call before the pages
/// exist.
void advise_placement(void* data, std::uint64_t bytes) noexcept;

/// "12.5 GiB", "64.0 MiB".
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

}  // namespace ucm::cache
