// Python face of the shared host cache (ucm/cache.h); ucm-backend-posix builds it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "handles.h"
#include "module.h"
#include "ucm/cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {
namespace {

/// Its own type, so that Python can tell "goes without" from "must not start".
class CacheTooSmall : public CacheError {
 public:
  explicit CacheTooSmall(const CacheError& e) : CacheError(e) {}
};

TierHandle open(const Geometry& geometry, std::string name, const nb::bytes& namespace_digest,
                std::uint64_t capacity_bytes, bool capacity_explicit, bool shared,
                std::uint32_t load_reserve, bool load_reserve_explicit, std::uint32_t rank,
                std::uint32_t rank_size, bool watcher, bool backend_only, std::string directory,
                double quarantine_s, std::uint32_t touch_threads) {
  CacheOptions o;
  if (namespace_digest.size() != o.namespace_digest.size()) {
    throw nb::value_error("namespace_digest must be 32 bytes");
  }
  std::memcpy(o.namespace_digest.data(), namespace_digest.data(), o.namespace_digest.size());
  o.name = std::move(name);
  o.capacity_bytes = capacity_bytes;
  o.capacity_explicit = capacity_explicit;
  o.shared = shared;
  o.load_reserve = load_reserve;
  o.load_reserve_explicit = load_reserve_explicit;
  o.rank = rank;
  o.rank_size = rank_size;
  o.watcher = watcher;
  o.backend_only = backend_only;
  o.directory = std::move(directory);
  o.quarantine = std::chrono::seconds(static_cast<std::int64_t>(quarantine_s));
  o.touch_threads = touch_threads;
  try {
    const nb::gil_scoped_release release;  // touching the pages takes its time
    return {open_cache(geometry, std::move(o))};
  } catch (const CacheError& e) {
    if (e.kind() == CacheErrorKind::kTooSmall) throw CacheTooSmall(e);
    throw;
  }
}

}  // namespace

void bind_cache(nb::module_& m) {
  const nb::exception<CacheError> base(m, "CacheSetupError", PyExc_RuntimeError);
  nb::exception<CacheTooSmall>(m, "CacheTooSmallError", base.ptr());
  const CacheOptions d;
  m.def("cache_tier", &open, "geometry"_a, nb::kw_only(), "name"_a, "namespace_digest"_a,
        "capacity_bytes"_a = 0, "capacity_explicit"_a = false, "shared"_a = true,
        "load_reserve"_a = d.load_reserve, "load_reserve_explicit"_a = false, "rank"_a = 0,
        "rank_size"_a = 0, "watcher"_a = false, "backend_only"_a = false,
        "directory"_a = d.directory, "quarantine_s"_a = static_cast<double>(d.quarantine.count()),
        "touch_threads"_a = 0,
        "Attach to the shared host cache of this name, or create it; see ucm/cache.h. Raises "
        "CacheTooSmallError, CacheSetupError.");
  m.def(
      "reclaim_dead_caches",
      [](const std::string& directory) {
        const nb::gil_scoped_release release;
        return reclaim_dead_caches(directory);
      },
      "directory"_a = d.directory,
      "Remove segments whose processes are all gone, never a live one; returns their names.");
}

}  // namespace ucm::bindings
