/* A program in C with N processes, which exchange their addresses through pipes where another one would use MPI. */

#include <geartrain_allreduce.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 100003

static void die(const char* what) {
  fprintf(stderr, "%s: %s\n", what, gt_last_error());
  exit(1);
}

static void read_all(int from, char* into, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = read(from, into, bytes);
    if (got <= 0) exit(3);
    into += got;
    bytes -= (size_t)got;
  }
}

static void rank_main(uint32_t rank, uint32_t world, int to_parent, int from_parent) {
  gt_options options;
  memset(&options, 0, sizeof options);
  options.bytes = sizeof options;
  options.rank = rank;
  options.world = world;
  gt_group* group = NULL;
  char mine[GT_ADDRESS_BYTES];
  char* all = malloc((size_t)world * GT_ADDRESS_BYTES);
  if (gt_group_listen(&options, &group, mine) != GT_OK) die("listen");
  if (write(to_parent, mine, sizeof mine) != (ssize_t)sizeof mine) exit(3);
  read_all(from_parent, all, (size_t)world * GT_ADDRESS_BYTES);
  if (gt_group_connect(group, all, 30.0) != GT_OK) die("connect");
  if (gt_group_spin(group, rank == 0 ? -1.0 : 1000.0) != GT_OK) die("spin");
  if (gt_group_spin(NULL, 0.0) != GT_INVALID || gt_group_spin(group, 1e300) != GT_INVALID) exit(4);

  gt_profile profile = {.bytes = sizeof profile};
  if (gt_group_profile(NULL, 1) != GT_INVALID || gt_group_profiled(group, NULL) != GT_INVALID) exit(10);
  if (gt_group_profile(group, 1) != GT_OK) die("profile");

  float* array = malloc(COUNT * sizeof(float));
  for (int step = 0; step < 10; ++step) {
    for (size_t i = 0; i < COUNT; ++i) array[i] = (float)(rank + (uint32_t)step);
    if (step % 2 == 0) {
      if (gt_allreduce(group, array, COUNT, GT_FLOAT32, GT_SUM, 30.0) != GT_OK) die("allreduce");
    } else {
      gt_work* work = NULL;
      if (gt_allreduce_start(group, array, COUNT, GT_FLOAT32, GT_SUM, 30.0, &work) != GT_OK) die("start");
      if (gt_wait(work, 30.0) != GT_OK) die("wait");
    }
    for (size_t i = 0; i < COUNT; ++i) {
      if (array[i] != (float)(world * (world - 1) / 2 + world * (uint32_t)step)) {
        fprintf(stderr, "rank %u: wrong number at %zu: %f\n", rank, i, (double)array[i]);
        exit(1);
      }
    }
  }
  if (gt_group_profiled(group, &profile) != GT_OK) die("profiled");
  if (profile.operations != 10 || profile.sent == 0 || profile.ns[GT_STAGE_SUM] == 0) exit(11);
  if (profile.entered[GT_STAGE_COPY_OUT] < 10 || profile.entered[GT_STAGE_COPY_IN] < 10) exit(12);
  profile.bytes -= 1;
  if (gt_group_profiled(group, &profile) != GT_INVALID || gt_group_profile(group, 0) != GT_OK) exit(13);
  int integers[4] = {1, 2, 3, 4};
  if (gt_allreduce(group, integers, 4, GT_INT32, GT_AVG, 30.0) != GT_INVALID) exit(4);
  if (strstr(gt_last_error(), "avg of int32") == NULL) exit(5);
  int bits[2] = {1 << rank, (int)rank + 1}, product = 1;
  for (uint32_t i = 0; i < world; ++i) product *= (int)i + 1;
  if (gt_allreduce(group, bits, 1, GT_INT32, GT_BOR, 30.0) != GT_OK || bits[0] != (1 << world) - 1) exit(7);
  if (gt_allreduce(group, bits + 1, 1, GT_INT32, GT_PRODUCT, 30.0) != GT_OK || bits[1] != product) exit(8);
  /* A disagreement ends the group for all, also for one that still waits for the operation before. */
  char go = 0;
  if (write(to_parent, &go, 1) != 1) exit(3);
  read_all(from_parent, &go, 1);
  if (gt_allreduce(group, array, rank == 0 ? 10 : 11, GT_FLOAT32, GT_SUM, 30.0) != GT_DISAGREE) exit(6);
  gt_group_close(group, 5.0);
  free(array);
  free(all);
}

int main(int argc, char** argv) {
  const uint32_t world = argc > 1 ? (uint32_t)atoi(argv[1]) : 3;
  int up[64][2], down[64][2];
  if (world == 0 || world > 64) return 2;
  for (uint32_t rank = 0; rank < world; ++rank) {
    if (pipe(up[rank]) != 0 || pipe(down[rank]) != 0) return 2;
    if (fork() == 0) {
      rank_main(rank, world, up[rank][1], down[rank][0]);
      return 0;
    }
  }
  char* all = malloc((size_t)world * GT_ADDRESS_BYTES);
  for (uint32_t rank = 0; rank < world; ++rank) read_all(up[rank][0], all + rank * GT_ADDRESS_BYTES, GT_ADDRESS_BYTES);
  for (uint32_t rank = 0; rank < world; ++rank) {
    if (write(down[rank][1], all, (size_t)world * GT_ADDRESS_BYTES) < 0) return 2;
  }
  char go = 0;
  for (uint32_t rank = 0; rank < world; ++rank) read_all(up[rank][0], &go, 1);
  for (uint32_t rank = 0; rank < world; ++rank) {
    if (write(down[rank][1], &go, 1) < 0) return 2;
  }
  int failed = 0, status = 0;
  while (wait(&status) > 0) failed += status != 0;
  if (failed == 0) printf("%u ranks agree\n", world);
  free(all);
  return failed != 0;
}
