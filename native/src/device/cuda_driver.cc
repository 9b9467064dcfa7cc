#include "device/cuda_driver.h"

#include <dlfcn.h>

#include <cerrno>

#include "ucm/cuda_device.h"

namespace ucm::cuda {
namespace {

template <class F>
void find(void* library, const std::string& path, const char* symbol, F& out) {
  out = reinterpret_cast<F>(::dlsym(library, symbol));
  if (out == nullptr) {
    throw DeviceError("cuda: " + path + " has no " + symbol +
                      ": it is not a CUDA driver, or one older than 11; install a current driver");
  }
}

}  // namespace

Driver::Driver(const std::string& library) {
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    throw DeviceError("cuda: the driver library cannot be loaded (" +
                      std::string(why != nullptr ? why : library) +
                      "); install the NVIDIA driver, or make it visible in the container");
  }
  const auto load = [&](const char* symbol, auto& out) { find(handle, library, symbol, out); };
  load("cuInit", init);
  load("cuDeviceGet", device_get);
  load("cuDevicePrimaryCtxRetain", context_retain);
  load("cuDevicePrimaryCtxRelease_v2", context_release);
  load("cuCtxPushCurrent_v2", context_push);
  load("cuCtxPopCurrent_v2", context_pop);
  load("cuCtxSynchronize", context_synchronize);
  load("cuStreamCreate", stream_create);
  load("cuStreamDestroy_v2", stream_destroy);
  load("cuStreamWaitEvent", stream_wait);
  load("cuStreamSynchronize", stream_synchronize);
  load("cuEventQuery", event_query);
  load("cuMemcpyDtoHAsync_v2", to_host);
  load("cuMemcpyHtoDAsync_v2", to_device);
  load("cuMemcpy2DAsync_v2", copy_2d);
  load("cuMemHostRegister_v2", host_register);
  load("cuMemHostUnregister", host_unregister);
  load("cuGetErrorName", error_name);
  load("cuGetErrorString", error_string);
  if (const Result r = init(0); r != kSuccess) {
    throw DeviceError("cuda: " + describe("cuInit", r) + "; check the driver with nvidia-smi");
  }
}

std::string Driver::describe(const char* call, Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(result, &name) != kSuccess || name == nullptr) name = "CUDA error";
  if (error_string(result, &text) != kSuccess || text == nullptr) text = "unknown to this driver";
  return std::string(call) + ": " + name + " " + std::to_string(result) + " (" + text + ")";
}

std::int32_t errno_of(Result result) noexcept {
  switch (result) {
    case 1:  // invalid value
      return EINVAL;
    case 2:  // out of memory
      return ENOMEM;
    case 3:    // not initialised
    case 4:    // driver shutting down
    case 100:  // no device
    case 101:  // invalid device
    case 201:  // invalid context
    case 709:  // context destroyed
      return ENODEV;
    case 400:  // invalid handle
      return EBADF;
    case 700:  // illegal address
      return EFAULT;
    case kAlreadyRegistered:
      return EBUSY;
    case 801:  // not supported
      return ENOTSUP;
    default:
      return EIO;
  }
}

}  // namespace ucm::cuda
