// The part of the CUDA driver that torch and Triton call, over runtime.cpp.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime_api.h>
#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
#define X extern "C" __attribute__((visibility("default")))
static thread_local long ctx = 1;
extern "C" std::atomic<long long> emulated_counts[16];
X CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
X CUresult cuDriverGetVersion(int *v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
X CUresult cuDeviceGet(CUdevice *d, int i) {
  *d = i;
  return CUDA_SUCCESS;
}
X CUresult cuDeviceGetCount(int *n) { return (CUresult)cudaGetDeviceCount(n); }
X CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  return (CUresult)cudaDeviceGetAttribute(v, (cudaDeviceAttr)a, d);
}
X CUresult cuCtxGetCurrent(CUcontext *c) {
  int d;
  cudaGetDevice(&d);
  *c = (CUcontext)(long)(d + 1);
  return CUDA_SUCCESS;
}
X CUresult cuCtxSetCurrent(CUcontext c) {
  if (c) cudaSetDevice((int)(long)c - 1);
  return CUDA_SUCCESS;
}
X CUresult cuCtxGetDevice(CUdevice *d) {
  cudaGetDevice(d);
  return CUDA_SUCCESS;
}
X CUresult cuCtxGetLimit(size_t *v, CUlimit) {
  *v = 1 << 20;
  return CUDA_SUCCESS;
}
X CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
X CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *f, int *a) {
  *f = 0;
  *a = 1;
  return CUDA_SUCCESS;
}
X CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
  *c = (CUcontext)(long)(d + 1);
  return CUDA_SUCCESS;
}
X CUresult cuGetErrorString(CUresult, const char **s) {
  *s = "emulated driver error";
  return CUDA_SUCCESS;
}
X CUresult cuGetErrorName(CUresult, const char **s) {
  *s = "emulated driver error";
  return CUDA_SUCCESS;
}
X CUresult cuModuleLoad(CUmodule *m, const char *) {
  *m = (CUmodule)64;
  return CUDA_SUCCESS;
}
X CUresult cuModuleLoadData(CUmodule *m, const void *) {
  *m = (CUmodule)64;
  return CUDA_SUCCESS;
}
X CUresult cuModuleLoadDataEx(CUmodule *m, const void *, unsigned, CUjit_option *, void **) {
  *m = (CUmodule)64;
  return CUDA_SUCCESS;
}
X CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
X CUresult cuModuleGetFunction(CUfunction *f, CUmodule, const char *) {
  *f = (CUfunction)128;
  return CUDA_SUCCESS;
}
X CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
X CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
X CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
X CUresult cuLaunchKernel(CUfunction, unsigned a, unsigned b, unsigned c, unsigned, unsigned, unsigned, unsigned, CUstream, void **,
                          void **) {
  emulated_counts[0]++;
  if (b > 65535 || c > 65535) {
    fprintf(stderr, "emulated CUDA: bad grid %u %u %u\n", a, b, c);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
X CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction, void **, void **) {
  emulated_counts[0]++;
  if (c->gridDimY > 65535 || c->gridDimZ > 65535) {
    fprintf(stderr, "emulated CUDA: bad grid\n");
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
X CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **) {
  emulated_counts[0]++;
  return CUDA_SUCCESS;
}
X CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}
X CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction, const CUlaunchConfig *) {
  *n = 16;
  return CUDA_SUCCESS;
}
X CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) {
  cudaPointerAttributes t;
  cudaPointerGetAttributes(&t, (void *)p);
  if (t.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)out = p;
  else if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)out = t.type == cudaMemoryTypeDevice ? 2 : 1;
  else if (a == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    *(int *)out = t.device;
  else
    memset(out, 0, 4);
  return CUDA_SUCCESS;
}
