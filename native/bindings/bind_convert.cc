// Python face of ucm/convert.h: a checked conversion plan, run without the GIL.
#include <nanobind/ndarray.h>

#include <span>
#include <string>

#include "module.h"
#include "ucm/convert.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {
namespace {

using Dims = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::uint64_t> as_span(const Dims& d) { return {d.data(), d.shape(0)}; }

/// A plan and the offsets of both regions inside the arrays it is given.
struct Converter {
  ConvertPlan plan;
  std::uint64_t source_offset;
  std::uint64_t target_offset;
};

Converter make(const Dims& shape, const Dims& source_strides, const Dims& target_strides,
               std::uint64_t run_bytes, std::uint64_t source_offset, std::uint64_t target_offset,
               std::uint64_t source_bytes, std::uint64_t target_bytes) {
  if (source_offset > source_bytes || target_offset > target_bytes)
    throw nb::value_error("an offset lies outside its region");
  std::string error;
  auto plan =
      ConvertPlan::make(as_span(shape), as_span(source_strides), as_span(target_strides), run_bytes,
                        source_bytes - source_offset, target_bytes - target_offset, error);
  if (!plan) throw nb::value_error(error.c_str());
  return {*plan, source_offset, target_offset};
}

void run(const Converter& c, const Bytes& source, const OutBytes& target) {
  if (source.shape(0) < c.source_offset + c.plan.src_bytes())
    throw nb::value_error("source is smaller than the plan's region");
  if (target.shape(0) < c.target_offset + c.plan.dst_bytes())
    throw nb::value_error("target is smaller than the plan's region");
  const auto* src = reinterpret_cast<const std::byte*>(source.data()) + c.source_offset;
  auto* dst = reinterpret_cast<std::byte*>(target.data()) + c.target_offset;
  const nb::gil_scoped_release release;
  c.plan.run(dst, src);
}

}  // namespace

void bind_convert(nb::module_& m) {
  nb::class_<Converter>(m, "Converter", "A layout conversion between regions of fixed sizes.")
      .def_static("make", &make, "shape"_a.noconvert(), "source_strides"_a.noconvert(),
                  "target_strides"_a.noconvert(), "run_bytes"_a, "source_offset"_a,
                  "target_offset"_a, "source_bytes"_a, "target_bytes"_a)
      .def("run", &run, "source"_a.noconvert(), "target"_a.noconvert());
}

}  // namespace ucm::bindings
