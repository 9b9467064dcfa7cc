// Python face of the Posix stage (ucm/posix.h); the plugin ucm-backend-posix builds it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "handles.h"
#include "module.h"
#include "ucm/posix.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {
namespace {

struct PosixHandle : StageHandle {
  ForkSafe<PosixStage> posix;
};

std::chrono::milliseconds ms(std::uint64_t n) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(n));
}

void construct(PosixHandle* self, const Geometry& geometry, std::vector<std::string> roots,
               std::string namespace_dir, const nb::bytes& namespace_digest, bool direct,
               std::string engine, std::uint32_t read_threads, std::uint32_t depth, bool fsync,
               bool verify_checksums, std::uint64_t stall_ms, std::uint64_t lookup_timeout_ms,
               std::uint64_t touch_interval_ms, std::uint64_t probe_interval_ms, bool gc_enabled,
               std::uint64_t capacity_bytes, double gc_trigger, double gc_recycle,
               double gc_candidate_extra, std::uint64_t gc_interval_ms, std::uint64_t orphan_age_ms,
               std::uint64_t lease_ttl_ms, std::string layout, std::string shm_directory,
               std::uint64_t quarantine_ms) {
  PosixOptions o;
  o.roots = std::move(roots);
  o.namespace_dir = std::move(namespace_dir);
  if (namespace_digest.size() != o.namespace_digest.size()) {
    throw nb::value_error("namespace_digest must be 32 bytes");
  }
  std::memcpy(o.namespace_digest.data(), namespace_digest.data(), o.namespace_digest.size());
  o.direct = direct;
  o.engine = std::move(engine);
  o.read_threads = read_threads;
  o.depth = depth;
  o.fsync = fsync;
  o.verify_checksums = verify_checksums;
  o.stall = ms(stall_ms);
  o.lookup_timeout = ms(lookup_timeout_ms);
  o.touch_interval = ms(touch_interval_ms);
  o.probe_interval = ms(probe_interval_ms);
  o.gc = {gc_enabled,         capacity_bytes,     gc_trigger,        gc_recycle,
          gc_candidate_extra, ms(gc_interval_ms), ms(orphan_age_ms), ms(lease_ttl_ms)};
  o.layout = std::move(layout);
  o.shm_directory = std::move(shm_directory);
  o.quarantine = ms(quarantine_ms);
  std::shared_ptr<PosixStage> stage;
  {
    const nb::gil_scoped_release release;
    stage = make_posix_stage(geometry, std::move(o));
  }
  new (self) PosixHandle{{stage}, stage};
}

}  // namespace

void bind_posix(nb::module_& m) {
  nb::exception<PosixSetupError>(m, "PosixSetupError", PyExc_RuntimeError);
  const PosixOptions d;
  const auto n = [](std::chrono::milliseconds t) { return static_cast<std::uint64_t>(t.count()); };
  nb::class_<PosixHandle, StageHandle>(m, "PosixStage",
                                       "Objects below directories; see ucm/posix.h")
      .def("__init__", &construct, "geometry"_a, nb::kw_only(), "roots"_a, "namespace_dir"_a,
           "namespace_digest"_a, "direct"_a = d.direct, "engine"_a = d.engine, "read_threads"_a = 0,
           "depth"_a = 0, "fsync"_a = d.fsync, "verify_checksums"_a = d.verify_checksums,
           "stall_ms"_a = n(d.stall), "lookup_timeout_ms"_a = n(d.lookup_timeout),
           "touch_interval_ms"_a = n(d.touch_interval), "probe_interval_ms"_a = n(d.probe_interval),
           "gc_enabled"_a = d.gc.enabled, "capacity_bytes"_a = d.gc.capacity_bytes,
           "gc_trigger"_a = d.gc.trigger, "gc_recycle"_a = d.gc.recycle,
           "gc_candidate_extra"_a = d.gc.candidate_extra, "gc_interval_ms"_a = n(d.gc.interval),
           "orphan_age_ms"_a = n(d.gc.orphan_age), "lease_ttl_ms"_a = n(d.gc.lease_ttl),
           "layout"_a = d.layout, "shm_directory"_a = d.shm_directory,
           "quarantine_ms"_a = n(d.quarantine), "Raises PosixSetupError.")
      .def(
          "describe", [](const PosixHandle& h) { return h.posix->describe(); },
          "Facts decided at set-up: engine, direct I/O, file system of each root.")
      .def(
          "last_errors", [](const PosixHandle& h) { return h.posix->last_errors(); },
          "The latest distinct errors with path and errno, oldest first (bounded).")
      .def(
          "collect_now",
          [](const PosixHandle& h, double timeout_s) {
            const nb::gil_scoped_release release;
            return h.posix->collect_now(
                std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000)));
          },
          "timeout_s"_a = 60.0,
          "Run a collection round now; False when this instance is not the collector.");
}

}  // namespace ucm::bindings
