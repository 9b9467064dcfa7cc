#include "store/counters.h"

namespace ucm {

void Counters::add_to(std::map<std::string, std::uint64_t>& out) const {
  static constexpr std::array<const char*, kKinds> kinds{"load", "dump", "commit"};
  static constexpr std::array<const char*, kStatuses> statuses{
      "ok", "pending", "miss", "corrupt", "io_error", "timeout", "rejected", "cancelled", "closed"};
  for (std::size_t k = 0; k < kKinds; ++k) {
    const std::string kind = std::string("store.") + kinds[k];
    out[kind + "_tasks_total"] = tasks[k];
    for (std::size_t s = 0; s < kStatuses; ++s) {
      if (static_cast<Status>(s) == Status::kPending) continue;
      out[kind + "_rows_" + statuses[s] + "_total"] = rows[k][s];
    }
  }
  out["store.dump_copied_bytes_total"] = copied_in_bytes;
  out["store.load_copied_bytes_total"] = copied_out_bytes;
  out["store.dump_copy_ns_total"] = copy_in_ns;
  out["store.load_copy_ns_total"] = copy_out_ns;
  out["store.copy_errors_total"] = copy_errors;
  out["store.prefetched_objects_total"] = prefetched_objects;
  out["store.prefetch_dropped_objects_total"] = prefetch_dropped_objects;
  out["store.written_objects_total"] = written_objects;
  out["store.backend_dump_retries_total"] = write_retries;
  out["store.backend_dump_errors_total"] = write_failures;
  out["store.backend_dumps_overdue_total"] = writes_overdue;
  out["store.discarded_objects_total"] = discarded_objects;
  out["store.expired_open_objects_total"] = expired_open_objects;
  out["store.abandoned_io_total"] = abandoned_io;
}

}  // namespace ucm
