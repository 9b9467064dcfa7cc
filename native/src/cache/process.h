// Who a process is, for people who look at a segment (liveness is decided by record locks).
#pragma once

#include <array>
#include <cstdint>

namespace ucm::cache {

/// Field 22 of /proc/<pid>/stat of this process; 0 when it cannot be read.
[[nodiscard]] std::uint64_t own_start_time() noexcept;
/// /proc/sys/kernel/random/boot_id; zeros when it cannot be read.
[[nodiscard]] std::array<std::uint8_t, 16> boot_id() noexcept;

}  // namespace ucm::cache
