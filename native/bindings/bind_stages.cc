// Python face of geometry, stages, tiers and host events. Stages and tiers are opaque to Python:
// built here (or by a plugin's own binding), handed to the Store.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>

#include "arrays.h"
#include "handles.h"
#include "module.h"
#include "ucm/canary_stage.h"
#include "ucm/device.h"
#include "ucm/empty_stage.h"
#include "ucm/fake_stage.h"
#include "ucm/guard_stage.h"
#include "ucm/staging_tier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {
namespace {

struct EventHandle {
  ForkSafe<HostEvent> event;
};

struct MediumHandle {
  ForkSafe<FakeMedium> medium;
};

struct FakeHandle : StageHandle {
  ForkSafe<FakeStage> fake;
};

Deadline in_seconds(double s) {
  return Clock::now() + std::chrono::microseconds(static_cast<std::int64_t>(s * 1e6));
}

using RunTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

void bind_geometry(nb::module_& m) {
  nb::class_<Geometry>(m, "Geometry", "Shape of every object of a store; see ucm/geometry.h")
      .def(
          "__init__",
          [](Geometry* self, std::uint32_t shard_count, std::uint64_t shard_bytes,
             std::uint32_t runs_per_shard, const std::vector<RunTuple>& runs, std::string layout) {
            std::vector<RunShape> shapes;
            for (const auto& [nbytes, count, stride] : runs)
              shapes.push_back({nbytes, count, stride});
            new (self) Geometry{shard_count, shard_bytes, runs_per_shard, std::move(shapes),
                                std::move(layout)};
          },
          "shard_count"_a, "shard_bytes"_a, "runs_per_shard"_a, "runs"_a, "layout"_a)
      .def_ro("shard_count", &Geometry::shard_count)
      .def_ro("shard_bytes", &Geometry::shard_bytes)
      .def_ro("runs_per_shard", &Geometry::runs_per_shard)
      .def_ro("layout", &Geometry::layout)
      .def_prop_ro("shard_stride", &Geometry::shard_stride)
      .def_prop_ro("object_bytes", &Geometry::object_bytes);
}

void bind_medium(nb::module_& m) {
  nb::class_<MediumHandle>(m, "FakeMedium",
                           "What a Fake stage stores; survives the stage. Raw access of tests.")
      .def("__init__",
           [](MediumHandle* self) { new (self) MediumHandle{std::make_shared<FakeMedium>()}; })
      .def("__len__", [](const MediumHandle& h) { return h.medium->size(); })
      .def("__contains__", [](const MediumHandle& h,
                              const nb::bytes& id) { return h.medium->contains(one_id(id)); })
      .def("ids",
           [](const MediumHandle& h) {
             nb::list out;
             for (const BlockId& id : h.medium->ids()) {
               out.append(nb::bytes(id.bytes.data(), id.bytes.size()));
             }
             return out;
           })
      .def(
          "get",
          [](const MediumHandle& h, const nb::bytes& id) -> nb::object {
            const auto object = h.medium->get(one_id(id));
            if (!object) return nb::none();
            return nb::bytes(object->data.data(), object->data.size());
          },
          "id"_a, "Data region of the object (padding included), or None.")
      .def("remove",
           [](const MediumHandle& h, const nb::bytes& id) { return h.medium->remove(one_id(id)); })
      .def(
          "corrupt",
          [](const MediumHandle& h, const nb::bytes& id, std::size_t offset) {
            return h.medium->corrupt(one_id(id), offset);
          },
          "id"_a, "offset"_a = 0)
      .def(
          "truncate",
          [](const MediumHandle& h, const nb::bytes& id, std::size_t bytes) {
            return h.medium->truncate(one_id(id), bytes);
          },
          "id"_a, "nbytes"_a)
      .def("swap", [](const MediumHandle& h, const nb::bytes& a,
                      const nb::bytes& b) { return h.medium->swap(one_id(a), one_id(b)); })
      .def("clear", [](const MediumHandle& h) { h.medium->clear(); })
      .def(
          "set_capacity", [](const MediumHandle& h, std::size_t n) { h.medium->set_capacity(n); },
          "objects"_a, "Objects it can hold; 0: unlimited.");
}

void bind_fake(nb::module_& m) {
  nb::class_<FakeHandle, StageHandle>(m, "FakeStage", "In-memory last stage; see ucm/fake_stage.h")
      .def(
          "__init__",
          [](FakeHandle* self, const Geometry& geometry, const MediumHandle& medium,
             std::uint32_t latency_us, std::uint64_t bytes_per_second, std::uint32_t lanes,
             std::uint32_t fail_nth_read, std::uint32_t fail_nth_write, bool manual) {
            auto fake =
                std::make_shared<FakeStage>(geometry, medium.medium,
                                            FakeOptions{latency_us, bytes_per_second, lanes,
                                                        fail_nth_read, fail_nth_write, manual});
            new (self) FakeHandle{{fake}, fake};
          },
          "geometry"_a, "medium"_a, nb::kw_only(), "latency_us"_a = 0, "bytes_per_second"_a = 0,
          "lanes"_a = 1, "fail_nth_read"_a = 0, "fail_nth_write"_a = 0, "manual"_a = false)
      .def(
          "inject",
          [](const FakeHandle& h, const nb::bytes& id, bool reads, int fault, int error,
             std::uint32_t times) {
            h.fake->inject(one_id(id), reads, static_cast<Fault>(fault), error, times);
          },
          "id"_a, nb::kw_only(), "reads"_a, "fault"_a, "error"_a = 5, "times"_a = 1)
      .def(
          "set_fault",
          [](const FakeHandle& h, int fault, int error) {
            h.fake->set_fault(static_cast<Fault>(fault), error);
          },
          "fault"_a, "error"_a = 5, "Every operation from now on meets it; 0: none.")
      .def(
          "step", [](const FakeHandle& h, std::uint32_t n) { h.fake->step(n); }, "n"_a = 1)
      .def(
          "release_hung",
          [](const FakeHandle& h, bool serve) {
            const nb::gil_scoped_release release;
            return h.fake->release_hung(serve);
          },
          nb::kw_only(), "serve"_a)
      .def_prop_ro("hung", [](const FakeHandle& h) { return h.fake->hung(); })
      .def_prop_ro("queued", [](const FakeHandle& h) { return h.fake->queued(); })
      .def(
          "set_latency", [](const FakeHandle& h, std::uint32_t us) { h.fake->set_latency(us); },
          "microseconds"_a);
}

}  // namespace

void bind_stages(nb::module_& m) {
  bind_geometry(m);
  nb::class_<StageHandle>(m, "Stage", "A storage stage (ucm/stage.h), to be handed to Store")
      .def_prop_ro("name", [](const StageHandle& h) { return h.stage->name(); })
      .def_prop_ro("identity",
                   [](const StageHandle& h) {
                     const std::string id = h.stage->identity();
                     return nb::bytes(id.data(), id.size());
                   })
      .def("stats", [](const StageHandle& h) { return h.stage->stats(); })
      .def("health", [](const StageHandle& h) { return h.stage->health(); })
      .def(
          "remove",
          [](const StageHandle& h, const IdArray& ids) {
            const auto span = id_span(ids);
            const nb::gil_scoped_release release;
            h.stage->remove(span);
          },
          nb::arg("ids").noconvert())
      .def(
          "shutdown",
          [](const StageHandle& h, double timeout_s) {
            const nb::gil_scoped_release release;
            h.stage->shutdown(in_seconds(timeout_s));
          },
          "timeout_s"_a = 10.0,
          "For stages that were built and never handed to a Store; a Store shuts its stage down.");
  nb::class_<TierHandle>(m, "HostTier", "Host memory of objects (ucm/host_tier.h), for Store")
      .def_prop_ro("name", [](const TierHandle& h) { return h.tier->name(); })
      .def("stats", [](const TierHandle& h) { return h.tier->stats(); })
      .def("health", [](const TierHandle& h) { return h.tier->health(); });
  bind_medium(m);
  bind_fake(m);
  m.def(
      "empty_stage",
      [](const Geometry& geometry) { return StageHandle{std::make_shared<EmptyStage>(geometry)}; },
      "geometry"_a, "A stage that accepts every object and finds none.");
  m.def(
      "canary_stage",
      [](const StageHandle& good, int bug) {
        if (bug < 0 || bug >= kPlantedBugs) throw nb::value_error("no such planted bug");
        return StageHandle{std::make_shared<CanaryStage>(good.stage, static_cast<PlantedBug>(bug))};
      },
      "good"_a, "bug"_a, "A stage with one planted bug (ucm/canary_stage.h) over a good one.");
  m.def(
      "guard_stage",
      [](const StageHandle& inner, std::uint32_t interval_ms, std::uint32_t timeout_ms,
         std::uint32_t window, std::uint32_t failures) {
        GuardOptions options;
        options.interval = std::chrono::milliseconds(interval_ms);
        options.timeout = std::chrono::milliseconds(timeout_ms);
        options.window = window;
        options.failures = failures;
        return StageHandle{std::make_shared<GuardStage>(inner.stage, options)};
      },
      "inner"_a, nb::kw_only(), "interval_ms"_a, "timeout_ms"_a, "window"_a, "failures"_a,
      "The health wrapper around a stage (ucm/guard_stage.h); it shuts the stage down.");
  m.attr("PLANTED_BUGS") = static_cast<int>(kPlantedBugs);
  m.def(
      "staging_tier",
      [](const Geometry& geometry, std::uint32_t load_reserve, std::uint32_t shared) {
        return TierHandle{std::make_shared<StagingTier>(geometry, load_reserve, shared)};
      },
      "geometry"_a, nb::kw_only(), "load_reserve"_a, "shared"_a,
      "Private pool of object buffers; retains nothing.");
  nb::class_<EventHandle>(m, "HostEvent",
                          "An event that host code fires; `handle` names it in dump")
      .def("__init__", [](EventHandle* self) { new (self) EventHandle{HostEvent::create()}; })
      .def("fire",
           [](const EventHandle& h) {
             const nb::gil_scoped_release release;
             h.event->fire();
           })
      .def_prop_ro("fired", [](const EventHandle& h) { return h.event->fired(); })
      .def_prop_ro("handle", [](const EventHandle& h) { return h.event->handle(); });
}

}  // namespace ucm::bindings
