// Python face of devices (ucm/device.h): opened here, or by a plugin's own binding, handed to the Store.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <span>

#include "arrays.h"
#include "handles.h"
#include "module.h"
#include "ucm/cuda_device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SourceArray = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kScatterBatch = 16;  // shards between two flushes of the device

std::span<std::byte> memory_of(const Bytes& a) {
  return {reinterpret_cast<std::byte*>(a.data()), a.size()};
}

void copy_shard(Device& device, const std::byte* shard, const std::uint64_t* addresses,
                const Geometry& g) {
  if (g.runs.size() == 1) return device.copy_out(shard, addresses, g.runs_per_shard, g.runs[0]);
  for (std::uint32_t r = 0; r < g.runs_per_shard; ++r) {
    const RunShape& run = g.runs[r % g.runs.size()];
    device.copy_out(shard, addresses + r, 1, run);
    shard += run.total();
  }
}

/// Shards that lie in host memory, each in one piece, to their runs in engine memory.
Outcome scatter(Device& device, std::span<const std::uint64_t> sources,
                const std::uint64_t* addresses, const Geometry& g, Event* event) {
  if (event != nullptr) device.order_after(*event);
  Outcome first{Status::kOk, 0};
  for (std::size_t at = 0; at < sources.size();) {
    const std::size_t end = std::min(sources.size(), at + kScatterBatch);
    for (; at < end; ++at) {
      copy_shard(device, reinterpret_cast<const std::byte*>(sources[at]),
                 addresses + at * g.runs_per_shard, g);
    }
    const Outcome done = device.flush();
    if (first.status == Status::kOk) first = done;
  }
  return first;
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::exception<DeviceError>(m, "DeviceSetupError", PyExc_RuntimeError);
  nb::class_<DeviceHandle>(m, "Device", "Where engine memory lives (ucm/device.h), for Store")
      .def_prop_ro("name", [](const DeviceHandle& h) { return h.device->name(); })
      .def("stats", [](const DeviceHandle& h) { return h.device->stats(); })
      .def("health", [](const DeviceHandle& h) { return h.device->health(); })
      .def(
          "scatter",
          [](const DeviceHandle& h, const Geometry& geometry, const SourceArray& sources,
             const AddressArray& addresses, std::uint64_t event) {
            if (addresses.shape(0) != sources.shape(0) ||
                addresses.shape(1) != geometry.runs_per_shard) {
              throw nb::value_error("scatter: addresses must be [sources, runs of a shard]");
            }
            const std::shared_ptr<Event> after = event == 0 ? nullptr : h.device->event(event);
            if (event != 0 && after == nullptr) throw nb::value_error("scatter: no such event");
            const nb::gil_scoped_release release;
            const Outcome done = scatter(*h.device, {sources.data(), sources.size()},
                                         addresses.data(), geometry, after.get());
            return std::tuple(static_cast<int>(done.status), done.error);
          },
          nb::arg("geometry"), nb::arg("sources").noconvert(), nb::arg("addresses").noconvert(),
          "event"_a = 0,
          "Copy shards at host addresses `sources` to engine memory, after `event`; address 0 "
          "skips a "
          "run. The caller vouches for all addresses. Returns (status, errno) when every byte is "
          "in "
          "place.")
      .def(
          "pin",
          [](const DeviceHandle& h, const Bytes& memory) {
            const nb::gil_scoped_release release;
            return h.device->pin(memory_of(memory));
          },
          nb::arg("memory").noconvert(),
          "Let the device reach host memory directly; returns why it cannot be, empty when it can.")
      .def(
          "unpin",
          [](const DeviceHandle& h, const Bytes& memory) {
            const nb::gil_scoped_release release;
            h.device->unpin(memory_of(memory));
          },
          nb::arg("memory").noconvert());
  m.def(
      "host_device", [] { return DeviceHandle{host_device()}; }, "Plain host memory.");
  m.def(
      "cuda_device",
      [](int ordinal, std::string library) {
        const nb::gil_scoped_release release;
        return DeviceHandle{open_cuda_device({ordinal, std::move(library)})};
      },
      "ordinal"_a, nb::kw_only(), "library"_a = CudaOptions{}.library,
      "A CUDA device; `library` is the driver's, another one only in tests. Raises "
      "DeviceSetupError.");
}

}  // namespace ucm::bindings
