// The part of the CUDA driver interface that is used, loaded by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ucm::cuda {

// As in cuda.h, whose binary interface is stable; declared here so that no toolkit is needed.
using Result = int;
using DevicePtr = unsigned long long;
struct ContextTag;
struct StreamTag;
struct EventTag;
using Context = ContextTag*;
using Stream = StreamTag*;
using EventHandle = EventTag*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kNotReady = 600;
inline constexpr Result kAlreadyRegistered = 712;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kRegisterPortable = 1;
inline constexpr int kMemoryHost = 1;
inline constexpr int kMemoryDevice = 2;

/// CUDA_MEMCPY2D, version 2.
struct Copy2D {
  std::size_t src_x, src_y;
  int src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  std::size_t src_pitch;
  std::size_t dst_x, dst_y;
  int dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  std::size_t dst_pitch;
  std::size_t width, height;
};

/// Function pointers of one loaded driver library; never unloaded.
struct Driver {
  /// Loads and initialises it. Throws DeviceError that names the library and what is missing.
  explicit Driver(const std::string& library);

  Result (*init)(unsigned) = nullptr;
  Result (*device_get)(int*, int) = nullptr;
  Result (*context_retain)(Context*, int) = nullptr;
  Result (*context_release)(int) = nullptr;
  Result (*context_push)(Context) = nullptr;
  Result (*context_pop)(Context*) = nullptr;
  Result (*context_synchronize)() = nullptr;
  Result (*stream_create)(Stream*, unsigned) = nullptr;
  Result (*stream_destroy)(Stream) = nullptr;
  Result (*stream_wait)(Stream, EventHandle, unsigned) = nullptr;
  Result (*stream_synchronize)(Stream) = nullptr;
  Result (*event_query)(EventHandle) = nullptr;
  Result (*to_host)(void*, DevicePtr, std::size_t, Stream) = nullptr;
  Result (*to_device)(DevicePtr, const void*, std::size_t, Stream) = nullptr;
  Result (*copy_2d)(const Copy2D*, Stream) = nullptr;
  Result (*host_register)(void*, std::size_t, unsigned) = nullptr;
  Result (*host_unregister)(void*) = nullptr;
  Result (*error_name)(Result, const char**) = nullptr;
  Result (*error_string)(Result, const char**) = nullptr;

  /// "cuStreamSynchronize: CUDA_ERROR_... (in words)".
  [[nodiscard]] std::string describe(const char* call, Result result) const;
};

/// The errno that comes nearest.
[[nodiscard]] std::int32_t errno_of(Result result) noexcept;

}  // namespace ucm::cuda
