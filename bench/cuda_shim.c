/* Stand-ins, for LD_PRELOAD, for the few CUDA runtime calls that FlashInfer's planner and launchers make: an H200's limits, copies by the CPU,
   launches that go nowhere and are printed with CUDA_SHIM_VERBOSE. Everything else stays in the real libcudart. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int cudaError_t;
typedef struct { unsigned x, y, z; } Dim;
typedef struct { Dim grid, block; size_t shared; void* stream; void* attributes; unsigned num_attributes; } LaunchConfig;

cudaError_t cudaGetDevice(int* device) { *device = 0; return 0; }
cudaError_t cudaSetDevice(int device) { return 0; }
cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 16: *value = 132; break;    /* multiprocessors */
    case 39: *value = 2048; break;   /* threads of one */
    case 75: *value = 9; break;      /* compute capability */
    case 76: *value = 0; break;
    case 81: *value = 233472; break; /* shared memory of a multiprocessor */
    case 97: *value = 232448; break; /* shared memory of a block, at most */
    case 8: *value = 49152; break;   /* shared memory of a block */
    default: *value = 0;
  }
  return 0;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, int kind, void* stream) { memcpy(target, source, size); return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num, const void* kernel, int threads, size_t shared, unsigned flags) {
  *num = 2;
  return 0;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, int attribute, int value) { return 0; }
cudaError_t cudaLaunchKernel(const void* kernel, Dim grid, Dim block, void** arguments, size_t shared, void* stream) {
  if (getenv("CUDA_SHIM_VERBOSE")) fprintf(stderr, "launch grid %u %u %u block %u %u %u shared %zu\n", grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
  return 0;
}
cudaError_t cudaLaunchKernelExC(const LaunchConfig* config, const void* kernel, void** arguments) {
  return cudaLaunchKernel(kernel, config->grid, config->block, arguments, config->shared, config->stream);
}
