// The module `_cuda`: addresses and sizes in, status out. Functions are named and called as those of `_cpu`, with the
// device and the stream at the end in place of the number of threads. The CUDA runtime is linked statically.
#include <ds/quant_arguments.h>
#include <pybind11/pybind11.h>

#include "cuda.h"

namespace py = pybind11;

namespace {

using ds::Dtype;
using ds::Status;

template <class T>
T *pointer(std::uintptr_t address) {
  return reinterpret_cast<T *>(address);
}
template <class T>
T *pointer(const py::handle &address) {
  return reinterpret_cast<T *>(address.cast<std::uintptr_t>());
}

// Runs `f(stream)` with `device` current, as this library's own runtime sees it; the caller's device is put back.
template <class F>
int on_device(int device, std::uintptr_t stream, const F &f) {
  py::gil_scoped_release nogil;
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) {
    cudaGetLastError();  // forget it, so that the next call does not report it
    return static_cast<int>(Status::launch_failed);
  }
  const Status status = f(reinterpret_cast<cudaStream_t>(stream));
  cudaSetDevice(before);
  return static_cast<int>(status);
}

int update(int rule, py::tuple coefficients, double grad_scale, bool zero_grad, std::uintptr_t rows, std::int64_t count,
           std::int64_t chunks, std::uint32_t dtypes, std::uintptr_t scale, std::uintptr_t ratio, std::uintptr_t partials,
           int device, std::uintptr_t stream) {
  ds::Update u = {};
  u.rule = static_cast<ds::Rule>(rule);
  u.zero_grad = zero_grad;
  u.grad_scale = static_cast<float>(grad_scale);
  if (coefficients.size() > ds::max_coefficients) return static_cast<int>(Status::bad_argument);
  for (std::size_t i = 0; i < coefficients.size(); i++) u.c[i] = static_cast<float>(coefficients[i].cast<double>());
  u.scale = pointer<const float>(scale);
  u.ratio = pointer<const float>(ratio);
  u.partials = pointer<double>(partials);
  auto dtype = [&](int i) { return static_cast<Dtype>(dtypes >> (8 * i) & 0xff); };
  u.list.count = count;
  u.list.param_dtype = dtype(0), u.list.grad_dtype = dtype(1), u.list.state_dtype = dtype(2), u.list.copy_dtype = dtype(3);
  return on_device(device, stream,
                   [&](cudaStream_t s) { return ds::cuda::update(u, pointer<const std::int64_t>(rows), chunks, s); });
}

int sum_squares(std::uintptr_t x, int dtype, std::int64_t n, std::uintptr_t partials, int device, std::uintptr_t stream) {
  return on_device(device, stream, [&](cudaStream_t s) {
    return ds::cuda::sum_squares(pointer<const void>(x), static_cast<Dtype>(dtype), n, pointer<double>(partials), s);
  });
}

int convert(std::uintptr_t dst, int dst_dtype, std::uintptr_t src, int src_dtype, std::int64_t n, double scale, int device,
            std::uintptr_t stream) {
  return on_device(device, stream, [&](cudaStream_t s) {
    return ds::cuda::convert(pointer<void>(dst), static_cast<Dtype>(dst_dtype), pointer<const void>(src),
                             static_cast<Dtype>(src_dtype), n, static_cast<float>(scale), s);
  });
}

int fill(std::uintptr_t dst, int dtype, std::int64_t n, double value, int device, std::uintptr_t stream) {
  return on_device(device, stream, [&](cudaStream_t s) {
    return ds::cuda::fill(pointer<void>(dst), static_cast<Dtype>(dtype), n, static_cast<float>(value), s);
  });
}

int quantize(py::tuple spec, py::tuple rows, std::uintptr_t order, std::uintptr_t x, int dtype, int device,
             std::uintptr_t stream) {
  const ds::QuantSpec s = ds::quant_spec(spec);
  const ds::QuantRows q = ds::quant_rows(rows);
  return on_device(device, stream, [&](cudaStream_t on) {
    return ds::cuda::quantize(s, q, pointer<const std::int64_t>(order), pointer<const void>(x), static_cast<Dtype>(dtype),
                              on);
  });
}

int dequantize(py::tuple spec, py::tuple rows, std::uintptr_t index, std::int64_t count, std::uintptr_t out, int dtype,
               int device, std::uintptr_t stream) {
  const ds::QuantSpec s = ds::quant_spec(spec);
  const ds::QuantRows q = ds::quant_rows(rows);
  return on_device(device, stream, [&](cudaStream_t on) {
    return ds::cuda::dequantize(s, q, pointer<const std::int64_t>(index), count, pointer<void>(out),
                                static_cast<Dtype>(dtype), on);
  });
}

int reduce(py::tuple spec, py::tuple rows, std::int64_t sources, double factor, std::uintptr_t out, int dtype, int device,
           std::uintptr_t stream) {
  const ds::QuantSpec s = ds::quant_spec(spec);
  const ds::QuantRows q = ds::quant_rows(rows);
  return on_device(device, stream, [&](cudaStream_t on) {
    return ds::cuda::reduce(s, q, sources, static_cast<float>(factor), pointer<void>(out), static_cast<Dtype>(dtype), on);
  });
}

int reduce_quantized(py::tuple spec, py::tuple rows, std::int64_t sources, double factor, py::tuple out_spec,
                     py::tuple out_rows, int device, std::uintptr_t stream) {
  const ds::QuantSpec s = ds::quant_spec(spec), so = ds::quant_spec(out_spec);
  const ds::QuantRows q = ds::quant_rows(rows), out = ds::quant_rows(out_rows);
  return on_device(device, stream, [&](cudaStream_t on) {
    return ds::cuda::reduce_quantized(s, q, sources, static_cast<float>(factor), so, out, on);
  });
}

// addresses: x, residual, weight, sum, y, rstd; 0 where absent.
int rms_norm(double eps, std::int64_t rows, std::int64_t cols, int dtype, py::tuple a, int device, std::uintptr_t stream) {
  const ds::Norm n = {eps, rows, cols, static_cast<Dtype>(dtype), pointer<const void>(a[0]), pointer<const void>(a[1]),
                      pointer<const float>(a[2]), pointer<void>(a[3]), pointer<void>(a[4]), pointer<float>(a[5])};
  return on_device(device, stream, [&](cudaStream_t s) { return ds::cuda::norm(n, s); });
}

// addresses: h, dy, dsum, weight, rstd, dx, dweight; 0 where absent.
int rms_norm_grad(std::int64_t rows, std::int64_t cols, int dtype, py::tuple a, int device, std::uintptr_t stream) {
  const ds::NormGrad n = {rows, cols, static_cast<Dtype>(dtype), pointer<const void>(a[0]), pointer<const void>(a[1]),
                          pointer<const void>(a[2]), pointer<const float>(a[3]), pointer<const float>(a[4]),
                          pointer<void>(a[5]), pointer<float>(a[6])};
  return on_device(device, stream, [&](cudaStream_t s) { return ds::cuda::norm_grad(n, s); });
}

// (devices this library can use, why not: empty if there are some)
py::tuple devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return py::make_tuple(count, count ? "" : "no CUDA device");
  cudaGetLastError();
  return py::make_tuple(0, cudaGetErrorString(error));
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of ds_ops; called through ds_ops._call only";
  m.attr("norm_grad_blocks") = ds::cuda::norm_grad_blocks;
  m.attr("sum_blocks") = ds::cuda::sum_blocks;
  m.attr("update_chunk") = ds::cuda::update_chunk;
  m.def("devices", devices);
  m.def("update", update, py::arg("rule"), py::arg("coefficients"), py::arg("grad_scale"), py::arg("zero_grad"),
        py::arg("rows"), py::arg("count"), py::arg("chunks"), py::arg("dtypes"), py::arg("scale"), py::arg("ratio"),
        py::arg("partials"), py::arg("device"), py::arg("stream"));
  m.def("sum_squares", sum_squares, py::arg("x"), py::arg("dtype"), py::arg("n"), py::arg("partials"), py::arg("device"),
        py::arg("stream"));
  m.def("convert", convert, py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("n"),
        py::arg("scale"), py::arg("device"), py::arg("stream"));
  m.def("fill", fill, py::arg("dst"), py::arg("dtype"), py::arg("n"), py::arg("value"), py::arg("device"),
        py::arg("stream"));
  m.def("quantize", quantize, py::arg("spec"), py::arg("rows"), py::arg("order"), py::arg("x"), py::arg("dtype"),
        py::arg("device"), py::arg("stream"));
  m.def("dequantize", dequantize, py::arg("spec"), py::arg("rows"), py::arg("index"), py::arg("count"), py::arg("out"),
        py::arg("dtype"), py::arg("device"), py::arg("stream"));
  m.def("reduce", reduce, py::arg("spec"), py::arg("rows"), py::arg("sources"), py::arg("factor"), py::arg("out"),
        py::arg("dtype"), py::arg("device"), py::arg("stream"));
  m.def("reduce_quantized", reduce_quantized, py::arg("spec"), py::arg("rows"), py::arg("sources"), py::arg("factor"),
        py::arg("out_spec"), py::arg("out_rows"), py::arg("device"), py::arg("stream"));
  m.def("norm", rms_norm, py::arg("eps"), py::arg("rows"), py::arg("cols"), py::arg("dtype"), py::arg("addresses"),
        py::arg("device"), py::arg("stream"));
  m.def("norm_grad", rms_norm_grad, py::arg("rows"), py::arg("cols"), py::arg("dtype"), py::arg("addresses"),
        py::arg("device"), py::arg("stream"));
}
