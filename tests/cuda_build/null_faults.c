/* Faults of GPUs, machines and networks, for null_nccl.c, which includes this file.
 *
 * NULL_FAULT=RANK:KIND[,RANK:KIND...] gives ranks a fault each; it comes with the rank's first collective after the file
 * NULL_FAULT_WHEN has appeared, so inside a step and in the middle of what the program does. Kinds:
 *
 *   kill, stop    the process gets SIGKILL or SIGSTOP
 *   host          the host stays in this call for ever, as it does in a driver or a file system
 *   slow          the host stays in it for NULL_FAULT_SECONDS, and then goes on
 *   gpu           a kernel that never ends follows the collective, in front of all that is asked of the device then
 *   ecc           an error that stays: every later call of CUDA's has it
 *   memory        what torch holds and does not use is another process's, and every later cudaMalloc finds no memory
 *   remote        NCCL tells an asynchronous error (ncclRemoteError), as when a connection breaks
 *   network       of all ranks: the collective after the next one is met by all and never ends
 *   unconnected   the host stays in ncclCommInitRank, which waits for ever
 *   raise         the program raises a RuntimeError in its main thread
 *   nan           the first of the numbers that are summed is NaN, and so is the next float that the host reads
 *
 * The last two, and `memory`, come where the numbers of a step are summed, behind its backward pass.
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
static void fault_in_collective(Comm *comm, size_t n, ncclDataType_t type) {
  static int there;
  int sums_of_step = n > 1 && type == ncclFloat64;
  char *when = getenv("NULL_FAULT_WHEN"), *seconds_ = getenv("NULL_FAULT_SECONDS");
  if (there || !*fault_of_this_rank() || !when || access(when, F_OK))
    return;
  if ((fault_is("memory") || fault_is("raise") || fault_is("nan")) && !sums_of_step)
    return;
  there = 1;
  if (fault_is("kill") || fault_is("stop"))
    kill(getpid(), fault_is("kill") ? SIGKILL : SIGSTOP);
  if (fault_is("host"))
    for (;;)
      pause();
  if (fault_is("slow"))
    usleep(1e6 * atof(seconds_ ? seconds_ : "1"));
  hangs_next = fault_is("gpu");
  if (fault_is("ecc"))
    null_device_error(cudaErrorECCUncorrectable);
  no_memory = fault_is("memory");
  if (fault_is("memory"))
    then(emptied);
  if (fault_is("raise"))
    then(raised);
  nan_next = nan_read = fault_is("nan");
  if (fault_is("remote"))
    null_device_nccl_error(ncclRemoteError);
  if (fault_is("network") && comm->meeting)
    __sync_bool_compare_and_swap(&comm->meeting->ends_at, 0, comm->calls + 1);
}
