// Each bindings file adds its part to the one extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace ucm::bindings {

void bind_device(nanobind::module_& m);
void bind_hash(nanobind::module_& m);
void bind_layout(nanobind::module_& m);
void bind_stages(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_posix(nanobind::module_& m);
void bind_cache(nanobind::module_& m);
void bind_compress(nanobind::module_& m);

}  // namespace ucm::bindings
