// Engine memory of an NVIDIA GPU, through the driver's own library, which is loaded at run time: nothing
// of CUDA is needed to build or to run without one.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "ucm/device.h"

namespace ucm {

/// The device cannot be used. The message names what was tried, the driver's error and what to do.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct CudaOptions {
  int ordinal = 0;  ///< as the driver counts them (CUDA_VISIBLE_DEVICES applies)
  std::string library = "libcuda.so.1";  ///< a path in tests, which bring a driver of their own
};

/// The device `ordinal`; one object per process, library and ordinal as long as somebody holds it. It
/// retains the primary context, which the engine uses as well, until the last holder is gone, and
/// makes it current around each of its calls only, on whatever thread.
///
/// Events are `CUevent` handles, which the caller keeps alive until the dump that names them is done.
/// Copies run on streams of the device's own, one per copying thread: after the event of a dump on the
/// stream itself, and over (cuStreamSynchronize) when flush() returns. Throws DeviceError.
[[nodiscard]] std::shared_ptr<Device> open_cuda_device(CudaOptions options);

}  // namespace ucm
