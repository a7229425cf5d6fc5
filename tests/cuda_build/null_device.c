/* A CUDA device that computes nothing: the functions of the runtime, the driver, cuBLAS(Lt) and NCCL that torch and
 * Triton call. With it the whole host side of a CUDA program runs on a machine without a GPU: allocator, dispatcher,
 * shape and stride checks, streams, autograd's threads, Inductor, Triton's compiler and launcher.
 *
 * Kernels are counted and not run. Device memory has addresses and sizes and no contents: the host may not touch it,
 * and what is copied from it is zeros; a bool is true with NULL_DEVICE_TRUE=1, so that its numbers are finite. The device
 * is as slow as it may be: nothing that was asked of it is done before the host waits for it, by a stream, an event or
 * the device. Until then what is copied to the host holds bytes of ones, NaN as a float; and if what is copied from the
 * host is changed or freed before, that is noted as a fault.
 *
 * With NULL_DEVICE_WORKS=1 it works by itself instead, as a GPU does: a thread does what can be done, what was asked of a
 * stream stands behind what is not met yet, and the host waits where 1,024 things are in the queue. It can then hang
 * (null_device_hang) or have an error that stays (null_device_error); see also null_nccl.c.
 *
 * Everything is counted by name; see null.py. Faults, a second GPU that a process touches among them, are also written
 * to the file NULL_DEVICE_FAULTS. Environment: NULL_DEVICE_CC (75, 80, 90, 100), NULL_DEVICE_GB, NULL_DEVICES (how many
 * GPUs the machine has), CUDA_VISIBLE_DEVICES.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
/* cuBLAS asks for types of which it has no functions here */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
typedef struct {
  unsigned short x;
} __half;
#include <cublasLt.h>
#include <cublas_v2.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
#define LOCK pthread_mutex_lock(&lock)
#define UNLOCK pthread_mutex_unlock(&lock)
static int cc(void) {
  static int v;
  if (!v) {
    char *e = getenv("NULL_DEVICE_CC");
    v = e ? atoi(e) : 90;
  }
  return v;
}
static size_t total_bytes(void) {
  static size_t v;
  if (!v) {
    char *e = getenv("NULL_DEVICE_GB");
    v = (size_t)((e ? atof(e) : 80) * (1ull << 30));
  }
  return v;
}
/* the GPUs of the machine that this process sees, by its own numbers */
enum { MOST_DEVICES = 16 };
static int seen[MOST_DEVICES];
static int devices(void) {
  static int v = -1;
  if (v < 0) {
    char *e = getenv("NULL_DEVICES"), *c = getenv("CUDA_VISIBLE_DEVICES");
    int there = e ? atoi(e) : 1, n = 0;
    if (c)
      while (*c && n < MOST_DEVICES) {
        char *end;
        long d = strtol(c, &end, 10);
        if (end == c || d < 0 || d >= there)
          break;
        seen[n++] = d;
        c = *end == ',' ? end + 1 : end;
      }
    else
      for (; n < there && n < MOST_DEVICES; n++)
        seen[n] = n;
    v = n;
  }
  return v;
}
static int physical(int d) { return d < devices() ? seen[d] : d; }
static int works(void) {
  static int v = -1;
  if (v < 0)
    v = getenv("NULL_DEVICE_WORKS") != 0;
  return v;
}
static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}
static volatile cudaError_t sticky;
void null_device_error(int e) { sticky = e; } /* of all calls from now on */
static __thread int current;
static __thread cudaError_t last;
static cudaError_t fail(cudaError_t e) {
  last = e;
  return e;
}

/* ---- the account: name -> count, and an ordered log ---- */
#define SLOTS 65536
static struct {
  char *name;
  unsigned long count;
  double amount;
} slot[SLOTS];
static void note(const char *name, double amount) {
  LOCK;
  unsigned long h = 5381;
  for (const char *c = name; *c; c++)
    h = h * 33 + (unsigned char)*c;
  for (unsigned long i = h % SLOTS;; i = (i + 1) % SLOTS) {
    if (!slot[i].name)
      slot[i].name = strdup(name);
    if (!strcmp(slot[i].name, name)) {
      slot[i].count++;
      slot[i].amount += amount;
      break;
    }
  }
  UNLOCK;
}
static void notef(double amount, const char *f, ...) {
  char b[4096];
  va_list a;
  va_start(a, f);
  vsnprintf(b, sizeof b, f, a);
  va_end(a);
  note(b, amount);
}
static void fault(const char *f, ...) {
  char b[1024], line[1200];
  va_list a;
  va_start(a, f);
  vsnprintf(b, sizeof b, f, a);
  va_end(a);
  notef(0, "FAULT %s", b);
  char *path = getenv("NULL_DEVICE_FAULTS"), *rank = getenv("RANK");
  int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
  int n = snprintf(line, sizeof line, "rank %s, process %d: %s\n", rank ? rank : "-", getpid(), b);
  if (file < 0 || write(file, line, n) < 0)
    fprintf(stderr, "null device: %s", line);
  if (file >= 0)
    close(file);
}
/* a GPU is touched by whatever needs a context there; a rank that touches two takes memory of another's */
static unsigned long touched;
static void touch(const char *what) {
  unsigned long bit = 1ul << physical(current);
  if (touched & bit)
    return;
  LOCK;
  unsigned long others = touched & ~bit;
  touched |= bit;
  UNLOCK;
  if (others)
    fault("%s on GPU %d of a process that has touched GPU %d", what, physical(current), __builtin_ctzl(others));
}
void null_device_reset(void) {
  LOCK;
  for (int i = 0; i < SLOTS; i++) {
    slot[i].count = 0;
    slot[i].amount = 0;
  }
  UNLOCK;
}
void null_device_dump(const char *path) {
  LOCK;
  FILE *f = fopen(path, "w");
  for (int i = 0; i < SLOTS; i++)
    if (slot[i].count)
      fprintf(f, "%lu\t%.0f\t%s\n", slot[i].count, slot[i].amount, slot[i].name);
  fclose(f);
  UNLOCK;
}

/* ---- memory ---- */
typedef struct Block {
  char *at;
  size_t size;
  int kind, device;
  struct Block *next;
} Block; /* kind 0 device, 1 host */
static Block *blocks;
static size_t used[64], peak[64];
static volatile int no_memory; /* see null_faults.c */
static cudaError_t get(void **p, size_t n, int kind) {
  LOCK;
  if (kind == 0 && (no_memory || used[current] + n > total_bytes())) {
    UNLOCK;
    *p = 0;
    return fail(cudaErrorMemoryAllocation);
  }
  int prot = kind == 1 ? PROT_READ | PROT_WRITE : PROT_NONE;
  char *at = mmap(0, n ? n : 1, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    UNLOCK;
    return fail(cudaErrorMemoryAllocation);
  }
  Block *b = malloc(sizeof *b);
  *b = (Block){at, n, kind, current, blocks};
  blocks = b;
  touch(kind == 0 ? "cudaMalloc" : "cudaHostAlloc");
  if (kind == 0) {
    used[current] += n;
    if (used[current] > peak[current])
      peak[current] = used[current];
  }
  UNLOCK;
  *p = at;
  return cudaSuccess;
}
static Block *find(const void *p) {
  for (Block *b = blocks; b; b = b->next)
    if ((char *)p >= b->at && (char *)p < b->at + (b->size ? b->size : 1))
      return b;
  return 0;
}
static cudaError_t drop(void *p) {
  if (!p)
    return cudaSuccess;
  LOCK;
  for (Block **q = &blocks; *q; q = &(*q)->next)
    if ((*q)->at == p) {
      Block *b = *q;
      *q = b->next;
      if (b->kind == 0)
        used[b->device] -= b->size;
      munmap(b->at, b->size ? b->size : 1);
      free(b);
      break;
    }
  UNLOCK;
  return cudaSuccess;
}
static int kind_of(const void *p) {
  LOCK;
  Block *b = find(p);
  int k = b ? b->kind : 2;
  UNLOCK;
  return k;
}

static int device_of(const void *p) {
  LOCK;
  Block *b = find(p);
  int d = b && b->kind == 0 ? physical(b->device) : -1;
  UNLOCK;
  return d;
}

/* ---- streams: what was asked of each, how much of it is done, and behind what the rest stands ---- */
typedef struct Stream Stream;
typedef struct Call Call; /* a collective, see null_nccl.c */
enum { EVENT, CALL, HANG };
typedef struct {
  unsigned long at;
  int kind;
  Stream *on; /* EVENT: behind so much of another stream */
  unsigned long upto;
  Call *call;
} Mark;
struct Stream {
  int capturing;
  unsigned long long id;
  int priority, device; /* -1: of whichever is current */
  unsigned long asked, done;
  Mark *marks;
  int first, num, room;
  Stream *next;
};
typedef struct Copy {
  Stream *on;
  unsigned long number;
  void *to;
  const void *from;
  size_t size;
  unsigned long sum;
  void *data;
  Call *call; /* out of whose result it comes */
  size_t offset;
  struct Copy *next;
} Copy;
static Stream legacy = {.device = -1}, *streams;
static int nan_read; /* see null_faults.c */
static Call *unmet; /* that was looked at last in vain, and the rank it waits for */
static int unmet_rank;
static int call_met(Call *c);
static char *result_of(Call *c);
static void hold(Call *c);
static void release(Call *c);
static void tell_unmet(void);
static double patience(void);
static Copy *copies;
static int num_capturing;
static unsigned long long captures;
static Stream *st(cudaStream_t s) {
  return (s == 0 || s == (cudaStream_t)1 || s == (cudaStream_t)2) ? &legacy : (Stream *)s;
}
static unsigned long sum_of(const void *p, size_t n) {
  unsigned long h = 14695981039346656037ul;
  const unsigned char *c = p;
  for (size_t i = 0; i < n; i++)
    h = (h ^ c[i]) * 1099511628211ul;
  return h;
}
/* what was copied to the device since the last kernel */
typedef struct Known {
  const char *at;
  size_t size;
  void *data; /* 0: the result of a call */
  Call *call;
  struct Known *next;
} Known;
static Known *known;
static void *copy_of(const void *p, size_t n) { return memcpy(malloc(n ? n : 1), p, n); }
static void learn(const void *at, const void *from, size_t n) {
  if (n > 1 << 20)
    return;
  LOCK;
  Known *k = malloc(sizeof *k);
  *k = (Known){at, n, copy_of(from, n), 0, known};
  known = k;
  UNLOCK;
}
/* with the lock held */
static void learn_call(const void *at, size_t n, Call *c) {
  Known *k = malloc(sizeof *k);
  *k = (Known){at, n, 0, c, known};
  known = k;
  hold(c);
}
/* what the newest that was learnt of these bytes says: its data, or a place in the result of a call */
static void *recall(const void *at, size_t n, Call **call, size_t *offset) {
  LOCK;
  Known *k = known;
  while (k && (k->at > (char *)at || k->at + k->size < (char *)at + n))
    k = k->next;
  void *found = k && k->data ? copy_of((char *)k->data + ((char *)at - k->at), n) : 0;
  if (k && k->call) {
    *call = k->call;
    *offset = (char *)at - k->at;
    hold(k->call);
  }
  UNLOCK;
  return found;
}
/* the bytes of a few that came from the host */
static void overlay(const void *at, size_t n, char *data, char *is_known) {
  LOCK;
  for (Known *k = known; k; k = k->next) {
    if (!k->data || k->at + k->size <= (char *)at || k->at >= (char *)at + n)
      continue;
    for (size_t i = 0; i < n; i++) {
      const char *b = (const char *)at + i;
      if (!is_known[i] && b >= k->at && b < k->at + k->size) {
        is_known[i] = 1;
        data[i] = ((char *)k->data)[b - k->at];
      }
    }
  }
  UNLOCK;
}
static void forget(void) {
  LOCK;
  while (known) {
    Known *k = known;
    known = k->next;
    free(k->data);
    if (k->call)
      release(k->call);
    free(k);
  }
  UNLOCK;
}
/* with the lock held */
static void mark(Stream *s, int kind, Stream *on, unsigned long upto, Call *call) {
  if (s->num == s->room) {
    s->room = s->room ? 2 * s->room : 64;
    s->marks = realloc(s->marks, s->room * sizeof *s->marks);
  }
  s->marks[s->num++] = (Mark){s->asked, kind, on, upto, call};
}
/* of what is copied to the host */
static int unknown_byte(size_t size) {
  if (size == sizeof(float) && nan_read) {
    nan_read = 0;
    return 0xff;
  }
  return size == 1 && getenv("NULL_DEVICE_TRUE");
}
static void done(Stream *s, unsigned long upto) {
  if (upto <= s->done)
    return;
  for (Copy **q = &copies; *q;) {
    Copy *c = *q;
    if (c->on != s || c->number > upto) {
      q = &c->next;
      continue;
    }
    *q = c->next;
    char *result = c->call ? result_of(c->call) : 0;
    if (c->to && c->data)
      memcpy(c->to, c->data, c->size);
    else if (c->to && result)
      memcpy(c->to, result + c->offset, c->size);
    else if (c->to)
      memset(c->to, unknown_byte(c->size), c->size);
    free(c->data);
    if (c->call)
      release(c->call);
    if (c->from && sum_of(c->from, c->size) != c->sum)
      fault("changed before it was copied");
    free(c);
  }
  /* last: a thread that asks for an event looks at this without the lock, and then reads what was copied */
  __atomic_store_n(&s->done, upto, __ATOMIC_RELEASE);
}
/* with the lock held: do of a stream what can be done, up to a point */
static void reach(Stream *s, unsigned long upto) {
  while (s->first < s->num && s->marks[s->first].at <= upto) {
    Mark m = s->marks[s->first];
    int met = 0;
    if (m.kind == EVENT) {
      reach(m.on, m.upto);
      met = m.on->done >= m.upto;
    }
    if (m.kind == CALL)
      met = call_met(m.call);
    if (!met) {
      done(s, m.at - 1);
      return;
    }
    s->first++;
    done(s, m.at);
    if (m.kind == CALL)
      release(m.call);
  }
  if (s->first == s->num)
    s->first = s->num = 0;
  done(s, upto);
}
static void reach_all(void) {
  reach(&legacy, legacy.asked);
  for (Stream *s = streams; s; s = s->next)
    reach(s, s->asked);
}
static void *work(void *nothing) {
  for (;; usleep(300)) {
    LOCK;
    if (!sticky)
      reach_all();
    UNLOCK;
  }
}
static void begin_work(void) {
  pthread_t thread;
  pthread_create(&thread, 0, work, 0);
  pthread_detach(thread);
}
/* the host waits */
static cudaError_t finish(Stream *s, unsigned long upto) {
  double began = 0;
  for (;;) {
    LOCK;
    if (!works())
      reach(s, upto);
    int there = s->done >= upto;
    if (!there && began && seconds() - began > patience())
      tell_unmet();
    UNLOCK;
    if (sticky)
      return fail(sticky);
    if (there)
      return cudaSuccess;
    if (!began)
      began = seconds();
    usleep(100);
  }
}
static cudaError_t finish_stream(Stream *s) { return finish(s, s->asked); }
static cudaError_t finish_all(void) {
  cudaError_t e = finish(&legacy, legacy.asked);
  for (Stream *s = streams; s && !e; s = s->next)
    e = finish(s, s->asked);
  return e;
}
/* there is room in the queue */
static void wait_for_room(Stream *s) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (works()) {
    pthread_once(&once, begin_work);
    while (s->asked - s->done > 1024 && !sticky)
      usleep(100);
  }
}
static void ask(Stream *s) {
  wait_for_room(s);
  LOCK;
  s->asked++;
  UNLOCK;
}
void null_device_hang(void) { /* a kernel that never ends */
  LOCK;
  legacy.asked++;
  mark(&legacy, HANG, 0, 0, 0);
  UNLOCK;
}
static int bad_in_capture(const char *what) {
  if (!num_capturing)
    return 0;
  fault("%s while capturing", what);
  return 1;
}

/* ---- device ---- */
cudaError_t cudaGetDeviceCount(int *n) {
  *n = devices();
  return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *d) {
  *d = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= devices())
    return fail(cudaErrorInvalidDevice);
  current = d;
  touch("cudaSetDevice"); /* it makes a context, since CUDA 12 */
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
static int sms(void) { return cc() == 80 ? 108 : cc() == 100 ? 148 : 132; }
static int smem_optin(void) { return cc() == 80 ? 166912 : 232448; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name,
           cc() == 75    ? "Tesla T4"
           : cc() == 80  ? "NVIDIA A100-SXM4-80GB"
           : cc() == 100 ? "NVIDIA B200"
                         : "NVIDIA H100 80GB HBM3");
  p->major = cc() / 10;
  p->minor = cc() % 10;
  p->totalGlobalMem = total_bytes();
  p->multiProcessorCount = sms();
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = smem_optin();
  p->sharedMemPerMultiprocessor = smem_optin() + 1024;
  p->l2CacheSize = 50 << 20;
  p->concurrentKernels = 1;
  p->unifiedAddressing = 1;
  p->canMapHostMemory = 1;
  p->asyncEngineCount = 3;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->memoryBusWidth = 5120;
  p->pciBusID = physical(d) + 1;
  p->maxBlocksPerMultiProcessor = 32;
  p->cooperativeLaunch = 1;
  p->streamPrioritiesSupported = 1;
  p->managedMemory = 1;
  p->uuid.bytes[0] = 0x6e;
  p->uuid.bytes[15] = physical(d) + 1;
  return cudaSuccess;
}
static int attribute(int a) {
  switch (a) {
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    return 1024;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
    return 1024;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
    return 64;
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
    return 2147483647;
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
    return 65535;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
    return 49152;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    return smem_optin();
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    return smem_optin() + 1024;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    return 32;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
    return 65536;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    return 1980000;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    return sms();
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
    return 2619000;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
    return 5120;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
    return 50 << 20;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
    return 2048;
  case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
  case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
  case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    return 1;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    return cc() / 10;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    return cc() % 10;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
    return 32;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
    return 0;
  default:
    return 0;
  }
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  *v = attribute((int)a);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *v, int a, int b) {
  *v = a != b;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned f) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", physical(d) + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *lo, int *hi) {
  if (lo)
    *lo = 0;
  if (hi)
    *hi = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
  note("wait cudaDeviceSynchronize", 0);
  touch("cudaDeviceSynchronize");
  if (finish_all())
    return last;
  return bad_in_capture("cudaDeviceSynchronize") ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) {
  *p = (cudaMemPool_t)1;
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc *a, size_t n) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { return cudaSuccess; }
cudaError_t cudaGetLastError(void) {
  cudaError_t e = last;
  last = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "null cuda error";
}
const char *cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation           ? "out of memory"
         : e == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
                                                  : "null cuda error";
}

cudaError_t cudaMalloc(void **p, size_t n) {
  notef(n, "cudaMalloc");
  return get(p, n, 0);
}
cudaError_t cudaFree(void *p) {
  note("wait cudaFree", 0);
  finish_all();
  return drop(p);
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return get(p, n, 0); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return drop(p); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) {
  notef(n, "cudaHostAlloc");
  return get(p, n, 1);
}
cudaError_t cudaMallocHost(void **p, size_t n) {
  notef(n, "cudaHostAlloc");
  return get(p, n, 1);
}
static void let_go(void *p) { /* of host memory, which nothing may be copied to or from any more */
  LOCK;
  Block *b = find(p);
  for (Copy *c = copies; b && c; c = c->next) {
    char *at = c->to ? c->to : (char *)c->from;
    if (at >= b->at && at < b->at + b->size) {
      fault("freed before it was copied");
      break;
    }
  }
  UNLOCK;
  finish_all();
}
cudaError_t cudaFreeHost(void *p) {
  note("wait cudaFreeHost", 0);
  let_go(p);
  return drop(p);
}
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) {
  notef(n, "cudaHostRegister");
  LOCK;
  Block *b = malloc(sizeof *b);
  *b = (Block){p, n, 1, 0, blocks};
  blocks = b;
  UNLOCK;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p) {
  let_go(p);
  LOCK;
  for (Block **q = &blocks; *q; q = &(*q)->next)
    if ((*q)->at == p) {
      Block *b = *q;
      *q = b->next;
      free(b);
      break;
    }
  UNLOCK;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
  *t = total_bytes();
  *f = no_memory ? 0 : *t - used[current];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  LOCK;
  Block *b = find(p);
  UNLOCK;
  a->type = !b ? cudaMemoryTypeUnregistered : b->kind ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = b ? b->device : 0;
  if (b) {
    a->devicePointer = (void *)p;
    if (b->kind)
      a->hostPointer = (void *)p;
  }
  return cudaSuccess;
}
static const char *PLACES[] = {"device", "pinned", "pageable"};
static cudaError_t move(void *to, const void *from, size_t n, const char *how, Stream *s) {
  int t = kind_of(to), f = kind_of(from);
  notef(n, "copy %s %s to %s", how, PLACES[f], PLACES[t]);
  touch("cudaMemcpy");
  if (sticky)
    return fail(sticky);
  if (t != 0 && f != 0) {
    memmove(to, from, n);
    return cudaSuccess;
  }
  if (t == 0 && f == 0) {
    ask(s);
    return cudaSuccess;
  }
  wait_for_room(s);
  Copy *c = malloc(sizeof *c);
  *c = (Copy){s, 0, t == 0 ? 0 : to, f == 0 ? 0 : from, n, f == 0 ? 0 : sum_of(from, n)};
  if (t == 0) {
    learn(to, from, n);
  } else {
    c->data = recall(from, n, &c->call, &c->offset);
    memset(to, 255, n);
  }
  if (f == 2)
    c->from = 0; /* pageable memory is read before the call returns */
  LOCK; /* the device may not come by before the copy is there */
  c->number = ++s->asked;
  c->next = copies;
  copies = c;
  UNLOCK;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
  if (bad_in_capture("cudaMemcpy"))
    return fail(cudaErrorStreamCaptureUnsupported);
  cudaError_t e = move(to, from, n, "at once", &legacy);
  return e ? e : finish_stream(&legacy);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
  return move(to, from, n, "behind", st(s));
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h,
                              enum cudaMemcpyKind k, cudaStream_t s) {
  for (size_t i = 0; i < h; i++)
    move((char *)to + i * tp, (char *)from + i * fp, w, "behind", st(s));
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int td, const void *from, int fd, size_t n, cudaStream_t s) {
  return move(to, from, n, "behind", st(s));
}
cudaError_t cudaMemcpyToSymbol(const void *s, const void *f, size_t n, size_t o, enum cudaMemcpyKind k) {
  return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int v, size_t n) {
  notef(n, "memset");
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
  notef(n, "memset");
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *s) {
  static void *at;
  if (!at)
    get(&at, 4096, 0);
  *p = at;
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
  memset(h, 0, sizeof *h);
  memcpy(h, &p, sizeof p);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned f) {
  memcpy(p, &h, sizeof *p);
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *p) { return cudaSuccess; }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) {
  memset(h, 0, sizeof *h);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) {
  *e = calloc(1, 64);
  return cudaSuccess;
}

/* ---- streams and events ---- */
static cudaError_t new_stream(cudaStream_t *s, int priority) {
  Stream *n = calloc(1, sizeof *n);
  n->priority = priority;
  n->device = physical(current);
  touch("cudaStreamCreate");
  LOCK;
  n->next = streams;
  streams = n;
  UNLOCK;
  *s = (cudaStream_t)n;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return new_stream(s, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return new_stream(s, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return new_stream(s, p); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
  *p = st(s)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  if (bad_in_capture("cudaStreamQuery"))
    return fail(cudaErrorStreamCaptureUnsupported);
  if (sticky)
    return fail(sticky);
  return st(s)->done == st(s)->asked ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  note("wait cudaStreamSynchronize", 0);
  touch("cudaStreamSynchronize");
  if (finish_stream(st(s)))
    return last;
  return st(s)->capturing && bad_in_capture("cudaStreamSynchronize") ? fail(cudaErrorStreamCaptureUnsupported)
                                                                     : cudaSuccess;
}
typedef struct {
  struct timespec at;
  Stream *on;
  unsigned long upto;
} Event;
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
  note("stream waits for event", 0);
  Stream *w = st(s);
  Event *v = (Event *)e;
  LOCK;
  if (v->on && v->on != w) {
    w->asked++;
    mark(w, EVENT, v->on, v->upto, 0);
  }
  UNLOCK;
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t c, void *u, unsigned f) {
  finish_stream(st(s));
  c(s, cudaSuccess, u);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) {
  finish_stream(st(s));
  f(u);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
  if (st(s) == &legacy)
    return fail(cudaErrorStreamCaptureUnsupported);
  st(s)->capturing = 1;
  st(s)->id = ++captures;
  num_capturing++;
  note("beginCapture", 0);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  st(s)->capturing = 0;
  num_capturing--;
  *g = calloc(1, 64);
  note("endCapture", 0);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *v) {
  *v = (st(s)->capturing || (num_capturing && st(s) != &legacy)) ? cudaStreamCaptureStatusActive
                                                                 : cudaStreamCaptureStatusNone;
  if (!st(s)->capturing)
    *v = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *v, unsigned long long *id,
                                     cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                     size_t *n) {
  *v = st(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id)
    *id = st(s)->id;
  if (g)
    *g = 0;
  if (d)
    *d = 0;
  if (e)
    *e = 0;
  if (n)
    *n = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long f) {
  *x = calloc(1, 64);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) {
  note("graphLaunch", 0);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { return cudaSuccess; }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t g, const char *p, unsigned f) { return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *n, size_t *k) {
  *k = 1;
  return cudaSuccess;
}
static cudaError_t new_event(cudaEvent_t *e) {
  *e = calloc(1, sizeof(Event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return new_event(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return new_event(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  free(e);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  note("event recorded", 0);
  touch("cudaEventRecord");
  Event *v = (Event *)e;
  clock_gettime(CLOCK_MONOTONIC, &v->at);
  v->on = st(s);
  v->upto = v->on->asked;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) {
  Event *v = (Event *)e;
  if (bad_in_capture("cudaEventQuery"))
    return fail(cudaErrorStreamCaptureUnsupported);
  if (sticky)
    return fail(sticky);
  return !v->on || v->on->done >= v->upto ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  Event *v = (Event *)e;
  touch("cudaEventSynchronize");
  if (v->on && v->on->done < v->upto) {
    note("wait cudaEventSynchronize", 0);
    if (finish(v->on, v->upto))
      return last;
  }
  return bad_in_capture("cudaEventSynchronize") ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  struct timespec x = ((Event *)a)->at, y = ((Event *)b)->at;
  *ms = (y.tv_sec - x.tv_sec) * 1e3 + (y.tv_nsec - x.tv_nsec) / 1e6;
  if (*ms < 1e-3)
    *ms = 1e-3;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---- kernels ---- */
typedef struct {
  const void *host;
  const char *name;
} Registered;
static Registered *registered;
static size_t num_registered, room;
void **__cudaRegisterFatBinary(void *b) {
  static void *x[1];
  return x;
}
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
char __cudaInitModule(void **h) { return 1; }
void __cudaRegisterFunction(void **h, const char *hf, char *df, const char *dn, int tl, void *a, void *b, void *c,
                            void *d, int *w) {
  LOCK;
  if (num_registered == room) {
    room = room ? 2 * room : 65536;
    registered = realloc(registered, room * sizeof *registered);
  }
  registered[num_registered++] = (Registered){hf, dn};
  UNLOCK;
}
void __cudaRegisterVar(void **h, char *hv, char *da, const char *dn, int e, size_t s, int c, int g) {}
static int sorted;
static int by_host(const void *a, const void *b) {
  const char *x = ((Registered *)a)->host, *y = ((Registered *)b)->host;
  return x < y ? -1 : x > y;
}
static const char *name_of(const void *f) {
  LOCK;
  if (sorted != (int)num_registered) {
    qsort(registered, num_registered, sizeof *registered, by_host);
    sorted = num_registered;
  }
  Registered key = {f, 0}, *r = bsearch(&key, registered, num_registered, sizeof key, by_host);
  UNLOCK;
  return r ? r->name : "unknown kernel";
}
static void launched(const void *f, dim3 g, dim3 b, size_t smem) {
  touch("a kernel");
  forget();
  if (smem > (size_t)smem_optin())
    fault("too much shared memory: %zu %s", smem, name_of(f));
  if (!g.x || !g.y || !g.z || g.y > 65535 || g.z > 65535)
    fault("no such grid: %u %u %u %s", g.x, g.y, g.z, name_of(f));
  notef((double)g.x * g.y * g.z * b.x * b.y * b.z, "kernel %s", name_of(f));
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  if (sticky)
    return fail(sticky);
  ask(st(s));
  launched(f, g, b, m);
  return cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  ask(st(s));
  launched(f, g, b, m);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
  if (sticky)
    return fail(sticky);
  ask(st(c->stream));
  launched(f, c->gridDim, c->blockDim, c->dynamicSmemBytes);
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  if (sticky)
    return fail(sticky);
  ask(st(s));
  launched((void *)k, g, b, m);
  return cudaSuccess;
}
static __thread struct {
  dim3 g, b;
  size_t m;
  cudaStream_t s;
} pushed[8];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, struct CUstream_st *s) {
  pushed[depth].g = g;
  pushed[depth].b = b;
  pushed[depth].m = m;
  pushed[depth].s = s;
  depth++;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) {
  depth--;
  *g = pushed[depth].g;
  *b = pushed[depth].b;
  *m = pushed[depth].m;
  *(cudaStream_t *)s = pushed[depth].s;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->numRegs = 32;
  a->maxThreadsPerBlock = 1024;
  a->binaryVersion = a->ptxVersion = cc();
  a->maxDynamicSharedSizeBytes = smem_optin();
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) {
  if (a == cudaFuncAttributeMaxDynamicSharedMemorySize && v > smem_optin())
    return fail(cudaErrorInvalidValue);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t m) {
  *n = 2048 / (b ? b : 1);
  if (*n > 32)
    *n = 32;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned x) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, b, m);
}

/* ---- driver ---- */
static CUresult nothing(void) { return CUDA_SUCCESS; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *n, void **f, unsigned v, unsigned long long fl,
                                             enum cudaDriverEntryPointQueryResult *r) {
  *f = dlsym(RTLD_DEFAULT, n);
  if (!*f)
    *f = (void *)nothing;
  if (r)
    *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#undef cuDeviceTotalMem
CUresult cuInit(unsigned f) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *d, int i) {
  *d = i;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *n) {
  *n = devices();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  *v = attribute(a);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
  *c = (CUcontext)(size_t)(0x1000 + d);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) {
  *f = 0;
  *a = (touched >> physical(d)) & 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *c) {
  *c = (CUcontext)(size_t)(0x1000 + current);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *d) {
  *d = current;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *v) {
  enum cudaStreamCaptureStatus status;
  cudaStreamIsCapturing((cudaStream_t)s, &status);
  *v = (CUstreamCaptureStatus)status;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext *c) {
  *c = (CUcontext)0x1000;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *v, CUlimit l) {
  *v = 1 << 20;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return CUDA_SUCCESS; }
/* memory in pieces behind one range of addresses, as expandable segments have it */
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr at, unsigned long long f) {
  void *range = mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  LOCK;
  Block *b = malloc(sizeof *b);
  *b = (Block){range, n, 0, current, blocks};
  blocks = b;
  UNLOCK;
  *p = (CUdeviceptr)range;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
  LOCK;
  Block *b = find((void *)p);
  if (b)
    used[b->device] += n; /* which `drop` takes away: a range by itself has no memory */
  UNLOCK;
  drop((void *)p);
  return CUDA_SUCCESS;
}
typedef struct {
  size_t size;
  int device;
} Piece;
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p, unsigned long long f) {
  int d = p->location.id;
  LOCK;
  if (no_memory || used[d] + n > total_bytes()) {
    UNLOCK;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  used[d] += n;
  if (used[d] > peak[d])
    peak[d] = used[d];
  UNLOCK;
  note("cuMemCreate", n);
  touch("cuMemCreate");
  Piece *piece = malloc(sizeof *piece);
  *piece = (Piece){n, d};
  *h = (CUmemGenericAllocationHandle)piece;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  Piece *piece = (Piece *)h;
  LOCK;
  used[piece->device] -= piece->size;
  UNLOCK;
  free(piece);
  return CUDA_SUCCESS;
}
/* libnvidia-ml.so.1 is this library by another name; torch's allocator asks it for the links between machines */
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(int *n) {
  char *e = getenv("NULL_DEVICES");
  *n = e ? atoi(e) : 1;
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  *device = 0;
  return 0;
}
enum { NVML_NOT_SUPPORTED = 3 };
int nvmlDeviceGetHandleByUUID(const char *id, void **device) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, void *info) {
  *n = 0;
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *v) {
  *v = 13000;
  return 0;
}
CUresult cuGetErrorString(CUresult e, const char **s) {
  *s = "null cuda error";
  return CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule *m, const char *p) {
  *m = malloc(8);
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *m, const void *p) {
  *m = malloc(8);
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule *m, const void *p, unsigned n, CUjit_option *o, void **v) {
  *m = malloc(8);
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) {
  *f = (CUfunction)strdup(n);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
static void dlaunched(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned m) {
  touch("a kernel of Triton");
  forget();
  if (m > (unsigned)smem_optin())
    fault("too much shared memory: %u %s", m, (char *)f);
  if (!x || !y || !z || y > 65535 || z > 65535)
    fault("no such grid: %u %u %u %s", x, y, z, (char *)f);
  notef((double)x * y * z * threads, "triton %s", (char *)f);
}
CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                        unsigned m, CUstream s, void **p, void **e) {
  if (sticky)
    return (CUresult)sticky;
  ask(st(s));
  dlaunched(f, x, y, z, bx * by * bz, m);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
  if (sticky)
    return (CUresult)sticky;
  ask(st(c->hStream));
  dlaunched(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ, c->sharedMemBytes);
  return CUDA_SUCCESS;
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                                   unsigned bz, unsigned m, CUstream s, void **p) {
  ask(st(s));
  dlaunched(f, x, y, z, bx * by * bz, m);
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int b, size_t m) {
  *n = 8;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
  *n = 8;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)v = p;
  else if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)v = kind_of((void *)p) == 0 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  else
    memset(v, 0, 4);
  return kind_of((void *)p) == 2 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *t, CUtensorMapDataType a, cuuint32_t b, void *c, const cuuint64_t *d,
                                const cuuint64_t *e, const cuuint32_t *f, const cuuint32_t *g, CUtensorMapInterleave h,
                                CUtensorMapSwizzle i, CUtensorMapL2promotion j, CUtensorMapFloatOOBfill k) {
  return CUDA_SUCCESS;
}
CUresult cuLinkCreate(unsigned n, CUjit_option *o, void **v, CUlinkState *s) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuLinkAddData(CUlinkState s, CUjitInputType t, void *d, size_t n, const char *nm, unsigned k, CUjit_option *o,
                       void **v) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuLinkComplete(CUlinkState s, void **c, size_t *n) { return CUDA_ERROR_NOT_SUPPORTED; }

/* ---- cuBLAS: products are counted with their shapes ---- */
typedef struct {
  cudaStream_t stream;
  cublasMath_t math;
  cublasPointerMode_t pointer;
} Blas;
cublasStatus_t cublasCreate_v2(cublasHandle_t *h) {
  *h = calloc(1, sizeof(Blas));
  return 0;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) { return 0; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) { return 0; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *w, size_t n) { return 0; }
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m) {
  ((Blas *)h)->math = m;
  return 0;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t *m) {
  *m = ((Blas *)h)->math;
  return 0;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m) {
  ((Blas *)h)->pointer = m;
  return 0;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *m) {
  *m = ((Blas *)h)->pointer;
  return 0;
}
static void product(const char *how, int t, long m, long n, long k, long b, int tf32) {
  notef(2.0 * m * n * k * b, "product %s type%d%s %ldx%ldx%ld batch%ld", how, t, tf32 ? "-tf32" : "", m, n, k, b);
}
cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *al, const void *A, cudaDataType at, int la, const void *B, cudaDataType bt,
                            int lb, const void *be, void *C, cudaDataType ct, int lc, cublasComputeType_t c,
                            cublasGemmAlgo_t g) {
  product("gemmEx", at, m, n, k, 1, ((Blas *)h)->math == CUBLAS_TF32_TENSOR_OP_MATH);
  return 0;
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                          int k, const void *al, const void *A, cudaDataType at, int la, long long sa,
                                          const void *B, cudaDataType bt, int lb, long long sb, const void *be, void *C,
                                          cudaDataType ct, int lc, long long sc, int batch, cublasComputeType_t c,
                                          cublasGemmAlgo_t g) {
  product("gemmStridedEx", at, m, n, k, batch, 0);
  return 0;
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                              const float *al, const float *A, int la, const float *B, int lb, const float *be,
                              float *C, int lc) {
  product("sgemm", 0, m, n, k, 1, ((Blas *)h)->math == CUBLAS_TF32_TENSOR_OP_MATH);
  return 0;
}
cublasStatus_t cublasDgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                              const double *al, const double *A, int la, const double *B, int lb, const double *be,
                              double *C, int lc) {
  product("dgemm", 1, m, n, k, 1, 0);
  return 0;
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                         int k, const float *al, const float *A, int la, long long sa, const float *B,
                                         int lb, long long sb, const float *be, float *C, int lc, long long sc,
                                         int batch) {
  product("sgemmStrided", 0, m, n, k, batch, 0);
  return 0;
}
cublasStatus_t cublasSgemv_v2(cublasHandle_t h, cublasOperation_t t, int m, int n, const float *al, const float *A,
                              int la, const float *x, int ix, const float *be, float *y, int iy) {
  product("sgemv", 0, m, n, 1, 1, 0);
  return 0;
}
cublasStatus_t cublasSgemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                             const float *al, const void *A, cudaDataType at, int la, const void *B, cudaDataType bt,
                             int lb, const float *be, void *C, cudaDataType ct, int lc) {
  product("sgemmEx", at, m, n, k, 1, 0);
  return 0;
}
cublasStatus_t cublasSdot_v2(cublasHandle_t h, int n, const float *x, int a, const float *y, int b, float *r) {
  return 0;
}
typedef struct {
  int type;
  unsigned long rows, cols;
  long ld;
} Mat;
cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) {
  *h = calloc(1, 64);
  return 0;
}
size_t cublasLtGetVersion(void) { return 130100; }
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType t, uint64_t r, uint64_t c,
                                          int64_t ld) {
  Mat *m = calloc(1, 256);
  *m = (Mat){t, r, c, ld};
  *l = (void *)m;
  return 0;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
  free((void *)l);
  return 0;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a,
                                                const void *b, size_t n) {
  return 0;
}
typedef struct {
  int ta, epilogue;
} Desc;
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t c, cudaDataType t) {
  *d = (void *)calloc(1, 256);
  return 0;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  free((void *)d);
  return 0;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *b,
                                              size_t n) {
  if (a == CUBLASLT_MATMUL_DESC_TRANSA)
    ((Desc *)d)->ta = *(int *)b;
  if (a == CUBLASLT_MATMUL_DESC_EPILOGUE)
    ((Desc *)d)->epilogue = *(int *)b;
  return 0;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
  *p = (void *)calloc(1, 256);
  return 0;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  free((void *)p);
  return 0;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t a, const void *b, size_t n) {
  return 0;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t A,
                                              cublasLtMatrixLayout_t B, cublasLtMatrixLayout_t C,
                                              cublasLtMatrixLayout_t D, cublasLtMatmulPreference_t p, int n,
                                              cublasLtMatmulHeuristicResult_t r[], int *got) {
  memset(r, 0, sizeof *r);
  *got = 1;
  return 0;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *al, const void *A,
                              cublasLtMatrixLayout_t Al, const void *B, cublasLtMatrixLayout_t Bl, const void *be,
                              const void *C, cublasLtMatrixLayout_t Cl, void *D, cublasLtMatrixLayout_t Dl,
                              const cublasLtMatmulAlgo_t *g, void *w, size_t ws, cudaStream_t s) {
  Mat *a = (Mat *)Al, *c = (Mat *)Dl;
  char how[32];
  snprintf(how, sizeof how, "lt-epi%d", ((Desc *)d)->epilogue);
  product(how, a->type, c->rows, c->cols, ((Desc *)d)->ta ? a->rows : a->cols, 1, 0);
  return 0;
}

/* ---- NCCL ---- */
#include "null_nccl.c"
