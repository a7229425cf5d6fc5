/* Faults of GPUs, machines and networks, for null_nccl.c, which includes this file.
 *
 * NULL_FAULT=RANK:KIND[,RANK:KIND...] gives ranks a fault each; it comes with the rank's first collective after the file
 * NULL_FAULT_WHEN has appeared, so inside a step and in the middle of what the program does. Kinds:
 *
 *   kill, stop    the process gets SIGKILL or SIGSTOP
 *   host          the host stays in this call for ever, as it does in a driver or a file system
 *   sums          the same where the numbers of a step are summed
 *   slow          the host stays in it for NULL_FAULT_SECONDS, and then goes on
 *   gpu           a kernel that never ends follows the collective, in front of all that is asked of the device then
 *   ecc           an error that stays: every later call of CUDA's has it
 *   memory        what torch holds and does not use is another process's, and every later cudaMalloc finds no memory
 *   remote        NCCL tells an asynchronous error (ncclRemoteError), as when a connection breaks
 *   network       of all ranks: the collective after the next one is met by all and never ends
 *   unconnected   the host stays in ncclCommInitRank, which waits for ever
 *   raise         the program raises a RuntimeError in its main thread
 *   nan           the first of the numbers that are summed is NaN, and so is the next float that the host reads
 *   search        `nan` and `memory` together: the search for the layer finds no memory
 *
 * The last three, and `memory`, come where the numbers of a step are summed, behind its backward pass.
 */
static const char *fault_of_this_rank(void) {
  static char mine[32];
  static int looked;
  if (!looked) {
    char *all = getenv("NULL_FAULT"), *rank = getenv("RANK");
    for (char *c = all; c && rank; c = strchr(c, ','), c = c ? c + 1 : 0)
      if (atoi(c) == atoi(rank))
        sscanf(c, "%*d:%31[a-z]", mine);
    looked = 1;
  }
  return mine;
}
static int fault_is(const char *kind) { return !strcmp(fault_of_this_rank(), kind); }

static int nan_next;
static int raised(void *nothing) {
  void **kind = dlsym(RTLD_DEFAULT, "PyExc_RuntimeError");
  void (*set)(void *, const char *) = dlsym(RTLD_DEFAULT, "PyErr_SetString");
  set(*kind, "a mistake of the program");
  return -1;
}
static int emptied(void *nothing) {
  return ((int (*)(const char *))dlsym(RTLD_DEFAULT, "PyRun_SimpleString"))("import torch; torch.cuda.empty_cache()");
}
/* have the main thread of Python do something as soon as it can */
static void then(int (*what)(void *)) {
  ((int (*)(int (*)(void *), void *))dlsym(RTLD_DEFAULT, "Py_AddPendingCall"))(what, 0);
}
static int hangs_next; /* behind the collective: torch has noted the start of this one before */
/* whether these are the numbers of a step: some of them were copied from the host. A sharded optimizer sums fp64 too */
static int are_sums_of_step(const void *send, size_t n, ncclDataType_t type) {
  char data[SMALL], known[SMALL] = {0};
  if (n < 2 || n * sizeof(double) > SMALL || type != ncclFloat64 || !send)
    return 0;
  overlay(send, n * sizeof(double), data, known);
  return memchr(known, 1, sizeof known) != 0;
}
static void fault_in_collective(Comm *comm, const void *send, size_t n, ncclDataType_t type) {
  static int there;
  char *when = getenv("NULL_FAULT_WHEN"), *seconds_ = getenv("NULL_FAULT_SECONDS");
  if (there || !*fault_of_this_rank() || !when || access(when, F_OK))
    return;
  int takes_memory = fault_is("memory") || fault_is("search"), gives_nan = fault_is("nan") || fault_is("search");
  int in_sums = fault_is("raise") || fault_is("sums");
  if ((takes_memory || gives_nan || in_sums) && !are_sums_of_step(send, n, type))
    return;
  there = 1;
  if (fault_is("kill") || fault_is("stop"))
    kill(getpid(), fault_is("kill") ? SIGKILL : SIGSTOP);
  if (fault_is("host") || fault_is("sums"))
    for (;;)
      pause();
  if (fault_is("slow"))
    usleep(1e6 * atof(seconds_ ? seconds_ : "1"));
  hangs_next = fault_is("gpu");
  if (fault_is("ecc"))
    null_device_error(cudaErrorECCUncorrectable);
  no_memory = takes_memory;
  if (takes_memory)
    then(emptied);
  if (fault_is("raise"))
    then(raised);
  nan_next = nan_read = gives_nan;
  if (fault_is("remote"))
    null_device_nccl_error(ncclRemoteError);
  if (fault_is("network") && comm->meeting)
    __sync_bool_compare_and_swap(&comm->meeting->ends_at, 0, comm->calls + 1);
}
