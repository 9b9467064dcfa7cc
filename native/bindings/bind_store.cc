// Python face of the Store (ucm/store.h). One crossing per batch; the GIL is released around every
// call that can wait or copy. ucm_core/store/native_store.py checks arguments and wraps results.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "arrays.h"
#include "handles.h"
#include "module.h"
#include "ucm/store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {
namespace {

/// How often a wait looks for signals (Ctrl-C).
constexpr std::chrono::milliseconds kSignalSlice{100};

struct TaskHandle {
  ForkSafe<Task> task;
};

struct StoreHandle {
  ForkSafe<Store> store;
};

Deadline until(std::optional<double> timeout_s, Deadline otherwise) {
  if (!timeout_s) return otherwise;
  const double s = std::clamp(*timeout_s, 0.0, 1e9);
  return Clock::now() + std::chrono::microseconds(static_cast<std::int64_t>(s * 1e6));
}

/// Wait in slices; false: expired. Raises what a signal handler raised.
template <class Wait>
bool wait_with_signals(Deadline deadline, Wait&& wait) {
  while (true) {
    const Deadline slice = std::min(deadline, Clock::now() + kSignalSlice);
    bool done = false;
    {
      const nb::gil_scoped_release release;
      done = wait(slice);
    }
    if (done) return true;
    if (Clock::now() >= deadline) return false;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void check_row(const Task& task, std::size_t row) {
  if (row >= task.size()) {
    throw nb::index_error(
        ("row " + std::to_string(row) + " of a task of " + std::to_string(task.size()) + " rows")
            .c_str());
  }
}

void bind_task(nb::module_& m) {
  nb::class_<TaskHandle>(m, "Task", "A submitted load, dump or commit; see ucm/store.h")
      .def("__len__", [](const TaskHandle& h) { return h.task->size(); })
      .def(
          "check",
          [](const TaskHandle& h, double timeout_s) {
            if (h.task->done()) return true;
            if (timeout_s <= 0) return false;
            const nb::gil_scoped_release release;
            return h.task->wait_until(until(timeout_s, h.task->deadline()));
          },
          "timeout_s"_a)
      .def("state", [](const TaskHandle& h) { return static_cast<int>(h.task->state()); })
      .def(
          "wait",
          [](const TaskHandle& h, std::optional<double> timeout_s, OutArray<std::uint8_t> out) {
            Task& task = *h.task;
            const auto wait = [&](Deadline d) { return task.wait_until(d); };
            if (!wait_with_signals(until(timeout_s, task.deadline()), wait)) {
              const nb::gil_scoped_release release;
              task.give_up(Status::kTimeout);
            }
            for (std::size_t i = 0; i < std::min(task.size(), out.shape(0)); ++i) {
              out(i) = static_cast<std::uint8_t>(task.outcome(i).status);
            }
          },
          nb::arg("timeout_s").none(), nb::arg("out").noconvert())
      .def(
          "wait_durable",
          [](const TaskHandle& h, std::optional<double> timeout_s, OutArray<std::uint8_t> out) {
            Task& task = *h.task;
            const auto wait = [&](Deadline d) { return task.wait_durable_until(d); };
            if (!wait_with_signals(until(timeout_s, task.durable_deadline()), wait)) {
              const nb::gil_scoped_release release;
              task.give_up_durable(Status::kTimeout);
            }
            for (std::size_t i = 0; i < std::min(task.size(), out.shape(0)); ++i) {
              out(i) = static_cast<std::uint8_t>(task.durable_outcome(i).status);
            }
          },
          nb::arg("timeout_s").none(), nb::arg("out").noconvert())
      .def(
          "wait_shard",
          [](const TaskHandle& h, std::size_t row, std::optional<double> timeout_s) {
            Task& task = *h.task;
            check_row(task, row);
            const auto wait = [&](Deadline d) { return task.wait_row_until(row, d); };
            if (!wait_with_signals(until(timeout_s, task.deadline()), wait)) {
              const nb::gil_scoped_release release;
              task.give_up_row(row, Status::kTimeout);
            }
            return static_cast<int>(task.outcome(row).status);
          },
          "row"_a, nb::arg("timeout_s").none())
      .def(
          "outcomes",
          [](const TaskHandle& h, OutArray<std::uint8_t> statuses, OutArray<std::int32_t> errnos,
             bool durable) {
            const Task& task = *h.task;
            const std::size_t n = std::min({task.size(), statuses.shape(0), errnos.shape(0)});
            for (std::size_t i = 0; i < n; ++i) {
              const Outcome o = durable ? task.durable_outcome(i) : task.outcome(i);
              statuses(i) = static_cast<std::uint8_t>(o.status);
              errnos(i) = o.error;
            }
          },
          nb::arg("statuses").noconvert(), nb::arg("errnos").noconvert(), "durable"_a)
      .def("cancel", [](const TaskHandle& h) {
        const nb::gil_scoped_release release;
        h.task->give_up(Status::kCancelled);
      });
}

/// A buffer on loan. Holds the store, so that arrays over it outlive whoever opened the store.
struct LentHandle {
  ForkSafe<Store> store;
  BlockId id;
  Lent lent;

  LentHandle(ForkSafe<Store> s, const BlockId& i, Lent l) : store(std::move(s)), id(i), lent(l) {}
  LentHandle(const LentHandle&) = delete;
  LentHandle& operator=(const LentHandle&) = delete;
  ~LentHandle() { store->give_back(lent.handle); }
};

void bind_lent(nb::module_& m) {
  using Array = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>>;
  nb::class_<LentHandle>(m, "LentBuffer", "A buffer on loan; see Store::lend in ucm/store.h")
      .def_prop_ro(
          "array",
          [](LentHandle& h) {
            const Geometry& g = h.store->geometry();
            const auto stride = static_cast<std::int64_t>(g.shard_stride());
            return Array(h.lent.data, {g.shard_count, g.shard_bytes}, nb::find(h), {stride, 1});
          },
          nb::rv_policy::reference)
      .def("donate",
           [](LentHandle& h) {
             std::shared_ptr<Task> task;
             {
               const nb::gil_scoped_release release;
               task = h.store->donate(h.id, h.lent.handle);
             }
             return TaskHandle{std::move(task)};
           })
      .def("give_back", [](LentHandle& h) { h.store->give_back(h.lent.handle); });
}

void bind_store_class(nb::module_& m) {
  nb::class_<StoreHandle>(m, "Store", "The native store; see ucm/store.h")
      .def(
          "__init__",
          [](StoreHandle* self, const StageHandle& below, const TierHandle* tier,
             std::uint32_t timeout_ms, std::uint32_t waiting_depth, std::uint32_t running_depth,
             std::uint32_t copiers, std::uint32_t write_retries, std::uint32_t retry_delay_ms,
             std::uint32_t open_age_ms, const DeviceHandle* device, bool synchronize_dumps) {
            StoreOptions options;
            options.synchronize_dumps = synchronize_dumps;
            options.timeout = std::chrono::milliseconds(timeout_ms);
            options.waiting_depth = waiting_depth;
            options.running_depth = running_depth;
            options.copiers = copiers;
            options.write_retries = write_retries;
            options.retry_delay = std::chrono::milliseconds(retry_delay_ms);
            options.open_age = std::chrono::milliseconds(open_age_ms);
            std::shared_ptr<HostTier> memory;
            if (tier != nullptr) memory = tier->tier;
            std::shared_ptr<Device> where = host_device();
            if (device != nullptr) where = device->device;
            const nb::gil_scoped_release release;  // pinning the buffers takes its time
            new (self) StoreHandle{
                std::make_shared<Store>(below.stage, std::move(memory), std::move(where), options)};
          },
          "below"_a, nb::arg("tier").none(), nb::kw_only(), "timeout_ms"_a, "waiting_depth"_a,
          "running_depth"_a, "copiers"_a, "write_retries"_a, "retry_delay_ms"_a, "open_age_ms"_a,
          nb::arg("device").none() = nb::none(), "synchronize_dumps"_a = false)
      .def(
          "lookup",
          [](const StoreHandle& h, const IdArray& ids, OutArray<bool> out) {
            static_assert(sizeof(bool) == 1);
            const auto span = id_span(ids);
            const std::span<std::uint8_t> present(reinterpret_cast<std::uint8_t*>(out.data()),
                                                  out.shape(0));
            const nb::gil_scoped_release release;
            h.store->lookup(span, present);
          },
          nb::arg("ids").noconvert(), nb::arg("out").noconvert())
      .def(
          "lookup_on_prefix",
          [](const StoreHandle& h, const IdArray& ids) {
            const auto span = id_span(ids);
            const nb::gil_scoped_release release;
            return h.store->lookup_on_prefix(span);
          },
          nb::arg("ids").noconvert())
      .def(
          "lookup_on_reverse",
          [](const StoreHandle& h, const IdArray& ids) {
            const auto span = id_span(ids);
            const nb::gil_scoped_release release;
            return h.store->lookup_on_reverse(span);
          },
          nb::arg("ids").noconvert())
      .def(
          "prefetch",
          [](const StoreHandle& h, const IdArray& ids) {
            const auto span = id_span(ids);
            const nb::gil_scoped_release release;
            h.store->prefetch(span);
          },
          nb::arg("ids").noconvert())
      .def(
          "touch",
          [](const StoreHandle& h, const IdArray& ids) {
            const auto span = id_span(ids);
            const nb::gil_scoped_release release;
            h.store->touch(span);
          },
          nb::arg("ids").noconvert())
      .def(
          "load",
          [](const StoreHandle& h, const IdArray& ids, const ShardArray& shards,
             const AddressArray& addresses, std::uint64_t event) {
            const Rows rows{
                id_span(ids), {shards.data(), shards.size()}, {addresses.data(), addresses.size()}};
            std::shared_ptr<Task> task;
            {
              const nb::gil_scoped_release release;
              task = h.store->load(rows, event);
            }
            return TaskHandle{std::move(task)};
          },
          nb::arg("ids").noconvert(), nb::arg("shards").noconvert(),
          nb::arg("addresses").noconvert(), "event"_a = 0)
      .def(
          "dump",
          [](const StoreHandle& h, const IdArray& ids, const ShardArray& shards,
             const AddressArray& addresses, std::uint64_t event, int mode) {
            const Rows rows{
                id_span(ids), {shards.data(), shards.size()}, {addresses.data(), addresses.size()}};
            std::shared_ptr<Task> task;
            {
              const nb::gil_scoped_release release;
              task = h.store->dump(rows, event, static_cast<CommitMode>(mode));
            }
            return TaskHandle{std::move(task)};
          },
          nb::arg("ids").noconvert(), nb::arg("shards").noconvert(),
          nb::arg("addresses").noconvert(), "event"_a, "mode"_a)
      .def(
          "commit",
          [](const StoreHandle& h, const IdArray& ids) {
            const auto span = id_span(ids);
            std::shared_ptr<Task> task;
            {
              const nb::gil_scoped_release release;
              task = h.store->commit(span);
            }
            return TaskHandle{std::move(task)};
          },
          nb::arg("ids").noconvert())
      .def(
          "lend",
          [](const StoreHandle& h, const IdArray& ids) -> nb::object {
            if (ids.shape(0) != 1) throw nb::value_error("lend: one id");
            const BlockId id = id_span(ids)[0];
            const Lent lent = h.store->lend(id);
            if (lent.data == nullptr) return nb::none();
            return nb::cast(new LentHandle(h.store, id, lent), nb::rv_policy::take_ownership);
          },
          nb::arg("ids").noconvert())
      .def(
          "discard",
          [](const StoreHandle& h, const IdArray& ids) {
            const auto span = id_span(ids);
            const nb::gil_scoped_release release;
            h.store->discard(span);
          },
          nb::arg("ids").noconvert())
      .def(
          "remove",
          [](const StoreHandle& h, const IdArray& ids) {
            const auto span = id_span(ids);
            const nb::gil_scoped_release release;
            h.store->remove(span);
          },
          nb::arg("ids").noconvert())
      .def("stats",
           [](const StoreHandle& h) {
             const nb::gil_scoped_release release;
             return h.store->stats();
           })
      .def("health",
           [](const StoreHandle& h) {
             const nb::gil_scoped_release release;
             return h.store->health();
           })
      .def("native_handle",
           [](const StoreHandle& h) { return reinterpret_cast<std::uintptr_t>(&*h.store); })
      .def(
          "close",
          [](const StoreHandle& h, double timeout_s) {
            const double s = std::clamp(timeout_s, 0.0, 1e6);
            const nb::gil_scoped_release release;
            return h.store->close(std::chrono::milliseconds(static_cast<std::int64_t>(s * 1e3)));
          },
          "timeout_s"_a);
}

/// Native errors become the project's own; the classes live in Python.
void translate(const std::exception_ptr& error, void*) {
  const auto raise = [](const char* name, const std::exception& e) {
    PyErr_SetString(nb::module_::import_("ucm_core.errors").attr(name).ptr(), e.what());
  };
  try {
    std::rethrow_exception(error);
  } catch (const ClosedError& e) {
    raise("ClosedError", e);
  } catch (const UnsupportedError& e) {
    raise("UnsupportedError", e);
  }
}

}  // namespace

void bind_store(nb::module_& m) {
  nb::register_exception_translator(translate);
  bind_task(m);
  bind_lent(m);
  bind_store_class(m);
}

}  // namespace ucm::bindings
