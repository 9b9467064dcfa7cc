// What the Store counts. Relaxed atomics: figures, not synchronisation.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "ucm/store.h"

namespace ucm {

struct Counters {
  using Count = std::atomic<std::uint64_t>;
  static constexpr std::size_t kStatuses = 9;
  static constexpr std::size_t kKinds = 3;

  std::array<std::array<Count, kStatuses>, kKinds> rows{};  ///< final rows by kind and status
  std::array<Count, kKinds> tasks{};
  Count copied_in_bytes{0};
  Count copied_out_bytes{0};
  Count copy_in_ns{0};
  Count copy_out_ns{0};
  Count copy_errors{0};  ///< rows whose copy the device failed
  Count prefetched_objects{0};
  Count prefetch_dropped_objects{0};  ///< queue full: prefetch carries no obligation
  Count written_objects{0};
  Count write_retries{0};
  Count write_failures{0};  ///< after the last retry: cache_backend_dump_wait_errors_total
  Count writes_overdue{0};  ///< the stage never answered within its bound
  Count discarded_objects{0};
  Count expired_open_objects{0};
  Count abandoned_io{0};

  void row(TaskKind kind, Status status) noexcept {
    rows[static_cast<std::size_t>(kind)][static_cast<std::size_t>(status)].fetch_add(
        1, std::memory_order_relaxed);
  }
  void add_to(std::map<std::string, std::uint64_t>& out) const;
};

}  // namespace ucm
