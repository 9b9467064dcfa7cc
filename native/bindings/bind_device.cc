// Python face of devices (ucm/device.h): opened here, or by a plugin's own binding, handed to the Store.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "handles.h"
#include "module.h"
#include "ucm/cuda_device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {

void bind_device(nb::module_& m) {
  nb::exception<DeviceError>(m, "DeviceSetupError", PyExc_RuntimeError);
  nb::class_<DeviceHandle>(m, "Device", "Where engine memory lives (ucm/device.h), for Store")
      .def_prop_ro("name", [](const DeviceHandle& h) { return h.device->name(); })
      .def("stats", [](const DeviceHandle& h) { return h.device->stats(); })
      .def("health", [](const DeviceHandle& h) { return h.device->health(); });
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
